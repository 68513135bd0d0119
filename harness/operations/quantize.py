"""Quantize, one matrix or both orientations of one, judged stage by stage."""

from __future__ import annotations

from contextlib import suppress

import torch

from harness.backend import Backend, Unsupported
from harness.case import Case
from harness.checks.stage import StageResult
from harness.finding import spaced
from harness.inputs import Inputs, Random
from harness.layouts import laid_out
from harness.operations.outcome import Outcome
from harness.operations.repeated import Tensors, repeated, timed
from harness.operations.stages import Subject, quantize_stages, values_stage
from harness.results import PARTS, as_quantized
from reference import ops as reference
from reference.quantized import Quantized
from reference.recipes import Recipe, recipe

HALVES = ("rowwise", "columnwise")


def judge_quantize(case: Case, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge quantize, and dequantize of its result where the backend has it; of usage both quantize_both."""
    if case.usage == "both":
        return _judge_both(case, inputs, backend)
    rule, swizzled = recipe(case.recipe), case.scales == "swizzled"
    random = inputs.random.get("x")

    def call(given: Tensors) -> Tensors:
        bits = given.get("random") if isinstance(random, torch.Tensor) else random
        q = backend.quantize(given["x"], rule, random=bits, swizzled=swizzled)  # type: ignore[arg-type]
        return parts_of(q)

    outputs, protection, seconds = repeated(backend, inputs.x.device, _given(case, inputs), call)
    kernel = as_quantized(outputs, inputs.x, rule, swizzled=swizzled)
    oracle, seconds_reference = timed(inputs.x.device, lambda: reference.quantize(inputs.x, rule, random=random))
    outcome = Outcome(protection, outputs, seconds=seconds, seconds_reference=seconds_reference)
    subject = Subject(inputs.x.flatten(0, -2), rule, random, free=rotates_freely(backend))
    add_judged(outcome, subject, kernel, oracle)
    if backend.has("dequantize"):
        with suppress(Unsupported):  # what quantize gave is judged all the same
            _judge_dequantize(outcome.judged[0].kernel, inputs.x.dtype, backend, outcome)
    return outcome


def parts_of(q: Quantized) -> Tensors:
    """What of a Quantized is bytes."""
    return {name: getattr(q, name) for name in PARTS}


def rotates_freely(backend: Backend) -> bool:
    """Whether the order in which the backend's rotation adds is its own."""
    return backend.declares.get("transform") != "butterfly"


def add_judged(outcome: Outcome, subject: Subject, kernel: Quantized, oracle: Quantized, prefix: str = "") -> None:
    """Judge the stages of one quantized matrix, and keep its values for the figures that are for information."""
    stages, judged = quantize_stages(subject, kernel, oracle, prefix)
    outcome.stages += stages
    outcome.judged.append(judged)
    expected = reference.dequantize(oracle)
    shown = judged.kernel
    same = all(torch.equal(*pair) for pair in ((shown.codes, oracle.codes), (shown.scales, oracle.scales)))
    actual = expected if same else reference.dequantize(shown)
    if outcome.expected is None or outcome.actual is None:
        outcome.expected, outcome.actual = expected, actual
    else:  # orientations and sections have no common shape, and the figures are over all elements
        outcome.expected = torch.cat([outcome.expected.flatten(), expected.flatten()])
        outcome.actual = torch.cat([outcome.actual.flatten(), actual.flatten()])


def _given(case: Case, inputs: Inputs) -> Tensors:
    """What a backend is given, by name; words of random bits are guarded as x is."""
    given: Tensors = {"x": laid_out(inputs.x, case.view)}
    words = {"random": inputs.random.get("x"), "random of the transpose": inputs.random.get("xT")}
    return given | {name: bits for name, bits in words.items() if isinstance(bits, torch.Tensor)}


def _judge_dequantize(kernel: Quantized, dtype: torch.dtype, backend: Backend, outcome: Outcome) -> None:
    """Run dequantize on the kernel's own result, guarded as quantize was, and add to its stages."""

    def call(given: Tensors) -> Tensors:
        q = Quantized(**given, recipe=kernel.recipe, shape=kernel.shape)  # type: ignore[arg-type]
        return {"values": backend.tensor("dequantize", kernel.shape, dtype, q, dtype)}

    outputs, protection, _ = repeated(backend, kernel.codes.device, parts_of(kernel), call)
    for before, now in zip(outcome.stages, protection, strict=False):  # memory and repeat come first in both
        before.add(now)
    values = outputs["values"]
    assert values is not None
    outcome.stages.append(values_stage(kernel, values))
    outcome.outputs["values"] = values


def _judge_both(case: Case, inputs: Inputs, backend: Backend) -> Outcome:
    rule, swizzled, x = recipe(case.recipe), case.scales == "swizzled", inputs.x
    random = inputs.random.get("x")

    def call(given: Tensors) -> Tensors:
        bits = (given["random"], given["random of the transpose"]) if isinstance(random, torch.Tensor) else random
        options = {"random": bits, "swizzled": swizzled}
        found: Tensors = {}
        halves = backend.quantize_both(given["x"], rule, **options)  # type: ignore[arg-type]
        for name, half in zip(HALVES, halves, strict=True):
            assert half is not None
            found |= {f"{name}.{part}": tensor for part, tensor in parts_of(half).items()}
        for number, name in enumerate(HALVES):
            with suppress(Unsupported):  # a kernel may make both or nothing
                alone = backend.quantize_both(given["x"], rule, **options, **{HALVES[1 - number]: False})[number]  # type: ignore[arg-type]
                assert alone is not None
                found |= {f"{name} alone.{part}": tensor for part, tensor in parts_of(alone).items()}
        return found

    outputs, protection, seconds = repeated(backend, x.device, _given(case, inputs), call)
    words = inputs.random.get("xT")
    bits = (random, words) if isinstance(words, torch.Tensor) else random
    oracles, seconds_reference = timed(x.device, lambda: reference.quantize_both(x, rule, random=bits))  # type: ignore[arg-type]
    kept = {name: tensor for name, tensor in outputs.items() if " alone" not in name}
    outcome = Outcome(protection, kept, seconds=seconds, seconds_reference=seconds_reference)
    matrix = x.flatten(0, -2)
    subjects = (
        Subject(matrix, rule.rowwise, random),
        columnwise_subject(matrix.T.contiguous(), rule, second_half(random, words), free=rotates_freely(backend)),
    )
    for name, subject, oracle in zip(HALVES, subjects, oracles, strict=True):
        assert oracle is not None
        found = {part: outputs[f"{name}.{part}"] for part in PARTS}
        kernel = as_quantized(found, x, subject.recipe, shape=oracle.shape, swizzled=swizzled)
        add_judged(outcome, subject, kernel, oracle, f"{name}.")
    if " alone" in "".join(outputs):
        outcome.stages.append(_halves(outputs))
    return outcome


def second_half(random: Random | None, words: Random | None = None) -> Random | None:
    """Random bits of the columnwise half, given those of the rowwise one: its own words, or the next offset."""
    return (random[0], random[1] + 1) if isinstance(random, tuple) else words


def columnwise_subject(matrix: torch.Tensor, rule: Recipe, random: Random | None, *, free: bool) -> Subject:
    """The columnwise half of `quantize_both`, as (K, M)."""
    return Subject(matrix, rule, random, transposed=rule.candidates != "6" and rule.block[0] > 1, free=free)


def _halves(outputs: Tensors) -> StageResult:
    """A half that is made alone has the bytes that it has beside the other."""
    result = StageResult("halves", "exact", 0)
    for name in HALVES:
        for part in PARTS:
            alone, beside = outputs.get(f"{name} alone.{part}"), outputs[f"{name}.{part}"]
            if alone is None or beside is None:
                continue
            result.compared += alone.numel()
            a, b = (t.view(torch.uint8) for t in (alone, beside))
            if not torch.equal(a, b):
                different = int((a != b).view(alone.numel(), -1).any(1).sum())
                result.mismatches += different
                of = f"{spaced(different)} of {spaced(alone.numel())} {part}"
                result.sentence = result.sentence or f"{of} of the {name} half differ when it is made alone"
    return result
