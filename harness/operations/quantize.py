"""Quantize, one matrix or both orientations of one, judged stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.backends.results import PARTS, as_quantized
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.checks.finding import spaced
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import Inputs, laid_out
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.black_box import Draw, bits_of, makes_own_bits, refuse_words, seed_torch
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import (
    Subject,
    no_codes,
    quantize_stages,
    stored_along_rows,
    values_stage,
)
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.reference.quantize.layout import elements
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe

HALVES = ("rowwise", "columnwise")


def judge_quantize(case: Case, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge quantize, and dequantize of its result where the backend has it; of usage both quantize_both."""
    if case.usage == "both":
        return _judge_both(case, inputs, backend)
    rule, swizzled, x = find_recipe(case.recipe), case.scales == "swizzled", inputs.x
    in_place = case.usage == "columnwise" and rule.columnwise == "in-place"
    random, scale = inputs.random.get("x"), inputs.scale.get("x")
    words = inputs.random.get("xT")
    own = makes_own_bits(backend, rule)
    refuse_words(case, backend, rule)

    def quantize(given: Tensors, bits: Any) -> Quantized:
        options: dict[str, Any] = {"scale": given.get("scale"), "swizzled": swizzled}
        if not in_place:
            return backend.quantize(given["x"], rule, random=bits, **options)  # type: ignore[arg-type]
        q = backend.quantize_both(given["x"], rule, rowwise=False, random=bits, **options)[1]  # type: ignore[arg-type]
        assert q is not None
        return q

    def call(given: Tensors) -> Tensors:
        if own:
            seed_torch(random)
        if in_place:
            return parts_of(quantize(given, random if words is None else (None, given["random of the transpose"])))
        return parts_of(quantize(given, given.get("random") if isinstance(random, torch.Tensor) else random))

    def expect() -> Quantized:
        if not in_place:
            return reference.quantize(x, rule, scale=scale, random=random)
        bits = random if words is None else (None, words)
        half = reference.quantize_both(x, rule, rowwise=False, scale=scale, random=bits)[1]  # type: ignore[arg-type]
        assert half is not None
        return half

    given = _given(case, inputs)
    outputs, protection, seconds = repeated(backend, x.device, given, call, ("codes",) if own else ())
    oracle = expect()
    outcome = Outcome(protection, outputs, seconds=seconds)
    matrix, free = x.flatten(0, -2), rotates_freely(backend)
    subject = (
        columnwise_subject(matrix.T.contiguous(), rule, second_half(random, words), free=free, own=own)
        if in_place
        else Subject(matrix, rule, random, free=free, own=own)
    )
    if own:
        subject.draw = _further(random, lambda bits: quantize(given, bits))
    kernel = _as_oracle(outputs, x, oracle, swizzled=swizzled)
    add_judged(outcome, subject, kernel, oracle)
    shown = outcome.judged[0].kernel
    if backend.has("dequantize") and not bool(no_codes(shown).any()):
        with suppress(Unsupported):  # what quantize gave is judged all the same
            _judge_dequantize(shown, x.dtype, backend, outcome)
    return outcome


def _as_oracle(parts: Tensors, x: torch.Tensor, oracle: Quantized, *, swizzled: bool) -> Quantized:
    """A kernel's parts as the Quantized of the matrix that `oracle` is of, stored as that is."""
    return as_quantized(parts, x, oracle.recipe, shape=oracle.shape, swizzled=swizzled, transposed=oracle.transposed)


def parts_of(q: Quantized) -> Tensors:
    """What of a Quantized is bytes."""
    return {name: getattr(q, name) for name in PARTS}


def rotates_freely(backend: Backend) -> bool:
    """Whether the order in which the backend's rotation adds is its own."""
    return backend.declares.get("transform") != "butterfly"


def _further(random: Random | None, quantize: Callable[[tuple[int, int]], Quantized | None]) -> Draw:
    """The codes of further calls, one an element, along the rows that are quantized."""
    assert isinstance(random, tuple)

    def draw(call: int) -> torch.Tensor:
        bits = bits_of(random, call)
        seed_torch(bits)
        q = quantize(bits)
        assert q is not None
        return elements(stored_along_rows(q), q.shape[1], q.recipe)

    return draw


def add_judged(outcome: Outcome, subject: Subject, kernel: Quantized, oracle: Quantized, prefix: str = "") -> None:
    """Judge the stages of one quantized matrix, and keep its values for the figures that are for information."""
    stages, judged = quantize_stages(subject, kernel, oracle, prefix)
    outcome.stages += stages
    outcome.judged.append(judged)
    expected = reference.dequantize(oracle)
    shown = judged.kernel
    same = all(torch.equal(*pair) for pair in ((shown.codes, oracle.codes), (shown.scales, oracle.scales)))
    actual = expected if same else _values(shown)
    if outcome.expected is None or outcome.actual is None:
        outcome.expected, outcome.actual = expected, actual
    else:  # orientations and sections have no common shape, and the figures are over all elements
        same = same and outcome.actual is outcome.expected
        outcome.expected = torch.cat([outcome.expected.flatten(), expected.flatten()])
        outcome.actual = outcome.expected if same else torch.cat([outcome.actual.flatten(), actual.flatten()])


def _values(kernel: Quantized) -> torch.Tensor:
    """Its values, NaN where a byte is no code."""
    bad = no_codes(kernel)
    if not bool(bad.any()):
        return reference.dequantize(kernel)
    values = reference.dequantize(replace(kernel, codes=kernel.codes.masked_fill(bad, 0)))
    return values.masked_fill(bad.T if kernel.transposed else bad, torch.nan)


def _given(case: Case, inputs: Inputs) -> Tensors:
    """What a backend is given, by name; words of random bits are guarded as x is."""
    given: Tensors = {"x": laid_out(inputs.x, case.view)}
    words = {"random": inputs.random.get("x"), "random of the transpose": inputs.random.get("xT")}
    others = words | {"scale": inputs.scale.get("x")}
    return given | {name: tensor for name, tensor in others.items() if isinstance(tensor, torch.Tensor)}


def _judge_dequantize(kernel: Quantized, dtype: torch.dtype, backend: Backend, outcome: Outcome) -> None:
    """Run dequantize on the kernel's own result, guarded as quantize was, and add to its stages."""

    def call(given: Tensors) -> Tensors:
        q = Quantized(**given, recipe=kernel.recipe, shape=kernel.shape, transposed=kernel.transposed)  # type: ignore[arg-type]
        return {"values": backend.tensor("dequantize", kernel.shape, dtype, q, dtype)}

    outputs, protection, _ = repeated(backend, kernel.codes.device, parts_of(kernel), call)
    for before, now in zip(outcome.stages, protection, strict=False):  # memory and repeat come first in both
        before.add(now)
    values = outputs["values"]
    assert values is not None
    outcome.stages.append(values_stage(kernel, values))
    outcome.outputs["values"] = values


def _judge_both(case: Case, inputs: Inputs, backend: Backend) -> Outcome:
    rule, swizzled, x = find_recipe(case.recipe), case.scales == "swizzled", inputs.x
    random, scale = inputs.random.get("x"), inputs.scale.get("x")
    own = makes_own_bits(backend, rule)
    refuse_words(case, backend, rule)

    def call(given: Tensors) -> Tensors:
        if own:
            seed_torch(random)
        bits = (given["random"], given["random of the transpose"]) if isinstance(random, torch.Tensor) else random
        options = {"scale": given.get("scale"), "random": bits, "swizzled": swizzled}
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

    given = _given(case, inputs)
    drawn = [f"{name}{alone}.codes" for name in HALVES for alone in ("", " alone")] if own else []
    outputs, protection, seconds = repeated(backend, x.device, given, call, drawn)
    words = inputs.random.get("xT")
    bits = (random, words) if isinstance(words, torch.Tensor) else random
    oracles = reference.quantize_both(x, rule, scale=scale, random=bits)  # type: ignore[arg-type]
    kept = {name: tensor for name, tensor in outputs.items() if " alone" not in name}
    outcome = Outcome(protection, kept, seconds=seconds)
    matrix = x.flatten(0, -2)
    subjects = (
        Subject(matrix, rule.rowwise, random, own=own),
        columnwise_subject(
            matrix.T.contiguous(), rule, second_half(random, words), free=rotates_freely(backend), own=own
        ),
    )

    def half(bits: tuple[int, int], number: int) -> Quantized | None:
        """One half of a further call: alone where it can be made so, since those codes are compared with nothing."""
        other = HALVES[1 - number]
        options: dict[str, Any] = {other: False} if f"{HALVES[number]} alone.codes" in outputs else {}
        return backend.quantize_both(given["x"], rule, scale=scale, random=bits, **options)[number]  # type: ignore[arg-type]

    for number, (name, subject, oracle) in enumerate(zip(HALVES, subjects, oracles, strict=True)):
        assert oracle is not None
        if own:
            subject.draw = _further(random, partial(half, number=number))
        found = {part: outputs[f"{name}.{part}"] for part in PARTS}
        kernel = _as_oracle(found, x, oracle, swizzled=swizzled)
        add_judged(outcome, subject, kernel, oracle, f"{name}.")
    if " alone" in "".join(outputs):
        outcome.stages.append(_halves(outputs, drawn))
    return outcome


def second_half(random: Random | None, words: Random | None = None) -> Random | None:
    """Random bits of the columnwise half, given those of the rowwise one: its own words, or the next offset."""
    return (random[0], random[1] + 1) if isinstance(random, tuple) else words


def columnwise_subject(
    matrix: torch.Tensor, rule: Recipe, random: Random | None, *, free: bool, own: bool = False
) -> Subject:
    """The columnwise half of `quantize_both`, as (K, M)."""
    return Subject(matrix, rule, random, transposed=rule.candidates != "6" and rule.block[0] > 1, free=free, own=own)


def _halves(outputs: Tensors, drawn: Collection[str]) -> StageResult:
    """A half that is made alone has the bytes that it has beside the other, but for what is `drawn` at random."""
    result = StageResult("halves", "exact", 0)
    for name in HALVES:
        for part in PARTS:
            alone, beside = outputs.get(f"{name} alone.{part}"), outputs[f"{name}.{part}"]
            if alone is None or beside is None or f"{name}.{part}" in drawn:
                continue
            result.compared += alone.numel()
            a, b = (t.view(torch.uint8) for t in (alone, beside))
            if not torch.equal(a, b):
                different = int((a != b).view(alone.numel(), -1).any(1).sum())
                result.mismatches += different
                of = f"{spaced(different)} of {spaced(alone.numel())} {part}"
                result.sentence = result.sentence or f"{of} of the {name} half differ when it is made alone"
    return result
