"""Quantize, one matrix or both orientations of one, judged stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.backends.guarded_memory import element_bytes
from narrowgauge.harness.backends.results import QUANTIZED_PARTS, as_quantized
from narrowgauge.harness.cases.families import CODES
from narrowgauge.harness.cases.sections import band_rows
from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import Inputs, laid_out
from narrowgauge.harness.operations.quantize.call import dequantize, quantize_both
from narrowgauge.harness.operations.quantize.call import quantize as call_quantize
from narrowgauge.harness.operations.quantize.case import HALVES, QuantizeCase
from narrowgauge.harness.operations.quantize.given_codes import given_operand
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.black_box import Draw, bits_of, makes_own_bits, refuse_words
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import (
    Subject,
    made_of,
    no_codes,
    quantize_stages,
    stored_along_rows,
    values_stage,
)
from narrowgauge.harness.operations.stages.repeated import Arguments, Tensors, present, repeated
from narrowgauge.reference.quantize.layout import elements
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe

WordsOfHalves = tuple[torch.Tensor | None, torch.Tensor | None]


def judge_quantize(case: QuantizeCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge quantize, and dequantize of its result if the backend has it; for usage both, quantize_both."""
    if case.usage == "both":
        return _judge_both(case, inputs, backend)
    recipe, swizzled, x = find_recipe(case.recipe), case.scales == "swizzled", inputs.x
    in_place = case.usage == "columnwise" and recipe.columnwise == "in-place"
    random, scale = inputs.random("x"), inputs.get("scale.x")
    own = makes_own_bits(backend, recipe)
    refuse_words(case, backend, recipe)

    def quantize(given: Tensors, random: Random | None) -> Quantized:
        options: dict[str, Any] = {"amax": given.get("amax"), "scale": given.get("scale"), "swizzled": swizzled}
        if in_place:
            bits, options["amax"] = _bits_of_halves(random, given), None  # recipes with such halves take no amax
            return only_half(quantize_both(backend, given["x"], recipe, rowwise=False, random=bits, **options))
        return call_quantize(backend, given["x"], recipe, random=given.get("random", random), **options)

    def call(given: Tensors) -> Tensors:
        if own:
            backend.host.seed(random)
        return present(parts_of(quantize(given, random)))

    given = _arguments(case, inputs)
    outputs, protection, seconds = repeated(backend, x.device, given, call, ("codes",) if own else ())
    if case.bands:
        return judge_bands(case, inputs, backend, Outcome(protection, outputs, seconds=seconds))
    outcome = Outcome(protection, outputs, seconds=seconds)
    matrix, free = x.flatten(0, -2), rotates_freely(backend)
    if in_place:
        bits = _bits_of_halves(random, given)
        oracle = only_half(reference.quantize_both(x, recipe, rowwise=False, scale=scale, random=bits))
        words = second_half(random, inputs.random("xT"))
        subject = columnwise_subject(matrix.T.contiguous(), recipe, words, free=free, own=own)
    else:
        oracle = reference.quantize(x, recipe, amax=inputs.get("amax.x"), scale=scale, random=random)
        subject = Subject(matrix, recipe, random, free=free, own=own, amax_given=case.amax)
    if own:
        subject.draw = _further(backend, random, lambda bits: quantize(given, bits))
    kernel = _as_oracle(outputs, x, oracle, swizzled=swizzled)
    add_judged(outcome, subject, kernel, oracle)
    shown = outcome.judged[0].kernel
    given_codes = case.inputs == CODES.name
    if backend.has("dequantize") and (given_codes or not bool(no_codes(shown).any())):
        with suppress(Unsupported):  # quantize is judged without dequantize too
            # In the memory layout that quantize gave, as a caller of both methods passes it on.
            stored = shown if swizzled else replace(shown, codes=kernel.codes, scales=kernel.scales)
            stored = given_operand(matrix, recipe) if given_codes else stored
            _judge_dequantize(stored, x.dtype, backend, outcome)
    return outcome


def judge_bands(case: QuantizeCase, inputs: Inputs, backend: Backend, outcome: Outcome) -> Outcome:
    """Judge the bands of a huge matrix, one below the other, and dequantize of the whole result.

    Elements elsewhere are NaN, which the amax leaves out, so that the bands have the bytes of a matrix of their own.
    """
    recipe, x, outputs = find_recipe(case.recipe), inputs.x, outcome.outputs
    bands = band_rows(*x.shape)

    def together(tensor: torch.Tensor, height: int = 1) -> torch.Tensor:
        return torch.cat([tensor[band.start // height : -(-band.stop // height)] for band in bands])

    matrix = together(x)
    height = 1 if recipe.whole else recipe.stored_rows
    parts = dict(outputs) | {"codes": together(outputs["codes"])}
    if not recipe.whole:
        parts["scales"] = together(outputs["scales"], height)
    oracle = reference.quantize(matrix, recipe)
    subject = Subject(matrix, recipe, free=rotates_freely(backend))
    add_judged(outcome, subject, _as_oracle(parts, matrix, oracle, swizzled=False), oracle)
    shown = outcome.judged[0].kernel
    if backend.has("dequantize") and not bool(no_codes(shown).any()):
        whole = as_quantized(outputs, x, recipe, shape=(x.shape[0], x.shape[1]), method="quantize")
        whole = replace(whole, amax=shown.amax, tensor_scale=shown.tensor_scale)

        def call(given: Tensors) -> Tensors:
            return {"values": dequantize(backend, made_of(given, whole), x.dtype)}

        with suppress(Unsupported):
            values, protection, _ = repeated(backend, x.device, parts_of(whole), call)
            for before, now in zip(outcome.stages, protection, strict=False):
                before.add(now)
            outcome.stages.append(values_stage(shown, together(values["values"])))
    rows = ", ".join(f"{band.start} to {band.stop - 1}" for band in bands)
    for stage in outcome.stages:
        if stage.sentence and stage.stage not in ("memory", "repeat"):
            stage.sentence += f"; row numbers count the judged rows of x alone, {rows}"
    outcome.outputs = parts
    return outcome


def only_half(halves: Iterable[Quantized | None]) -> Quantized:
    """The half that quantize_both gave when the other one was not wanted."""
    (half,) = _made(halves)
    return half


def _made(halves: Iterable[Quantized | None]) -> list[Quantized]:
    """The halves that quantize_both gave."""
    return [half for half in halves if half is not None]


def _bits_of_halves(random: Random | None, given: Tensors) -> tuple[int, int] | WordsOfHalves | None:
    """Random bits for quantize_both: seed and offset, or the words of the two halves among the arguments."""
    if isinstance(random, tuple):
        return random
    words = given.get("random"), given.get("random of the transpose")
    return words if any(part is not None for part in words) else None


def _amaxes_of_halves(given: Tensors) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The amaxes of the rowwise and the columnwise half among the arguments, or None."""
    return (given["amax"], given["amax of the transpose"]) if "amax" in given else None


def _as_oracle(parts: Tensors, x: torch.Tensor, oracle: Quantized, *, swizzled: bool) -> Quantized:
    """A kernel's parts as the Quantized of the matrix that `oracle` is of, stored as that is."""
    return as_quantized(
        parts, x, oracle.recipe, shape=oracle.shape, swizzled=swizzled, transposed=oracle.transposed, method="quantize"
    )


def parts_of(q: Quantized) -> Arguments:
    """The tensors of a Quantized by name; None for a number that it does not hold."""
    return {name: getattr(q, name) for name in QUANTIZED_PARTS}


def rotates_freely(backend: Backend) -> bool:
    """Whether the backend leaves the order of the additions of its rotation undeclared."""
    return backend.declares.get("transform") != "butterfly"


def _further(backend: Backend, random: Random | None, quantize: Callable[[tuple[int, int]], Quantized]) -> Draw:
    """A function that returns the codes of further calls, one per element, along the rows that are quantized."""
    assert isinstance(random, tuple)

    def draw(call: int) -> torch.Tensor:
        bits = bits_of(random, call)
        backend.host.seed(bits)
        q = quantize(bits)
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


def _arguments(case: QuantizeCase, inputs: Inputs) -> Tensors:
    """The tensors that a backend is given, by name; words of random bits are guarded as x is."""
    words = {"random": inputs.random("x"), "random of the transpose": inputs.random("xT")}
    amaxes = {"amax": inputs.get("amax.x"), "amax of the transpose": inputs.get("amax.xT")}
    options = words | amaxes | {"scale": inputs.get("scale.x")}
    passed = {name: tensor for name, tensor in options.items() if isinstance(tensor, torch.Tensor)}
    return {"x": laid_out(inputs.x, case.view), **passed}


def _judge_dequantize(kernel: Quantized, dtype: torch.dtype, backend: Backend, outcome: Outcome) -> None:
    """Run dequantize on the result of the kernel, guarded as quantize was, and add to the stages."""

    def call(given: Tensors) -> Tensors:
        return {"values": dequantize(backend, made_of(given, kernel), dtype)}

    outputs, protection, _ = repeated(backend, kernel.codes.device, parts_of(kernel), call)
    for before, now in zip(outcome.stages, protection, strict=False):  # memory and repeat come first in both
        before.add(now)
    outcome.decoded = kernel
    outcome.stages.append(values_stage(kernel, outputs["values"]))
    outcome.outputs["values"] = outputs["values"]


def _judge_both(case: QuantizeCase, inputs: Inputs, backend: Backend) -> Outcome:
    recipe, swizzled, x = find_recipe(case.recipe), case.scales == "swizzled", inputs.x
    random, scale = inputs.random("x"), inputs.get("scale.x")
    own = makes_own_bits(backend, recipe)
    refuse_words(case, backend, recipe)

    def call(given: Tensors) -> Tensors:
        if own:
            backend.host.seed(random)
        bits = _bits_of_halves(random, given)
        options: dict[str, Any] = {"scale": given.get("scale"), "random": bits, "swizzled": swizzled}
        options |= {"amax": _amaxes_of_halves(given)}
        outputs: dict[str, torch.Tensor | None] = {}
        halves = _made(quantize_both(backend, given["x"], recipe, **options))
        for name, half in zip(HALVES, halves, strict=True):
            outputs |= {f"{name}.{part}": tensor for part, tensor in parts_of(half).items()}
        for name, other in zip(HALVES, reversed(HALVES), strict=True):
            with suppress(Unsupported):  # a kernel may be able to make only both halves
                alone = only_half(quantize_both(backend, given["x"], recipe, **options | {other: False}))
                outputs |= {f"{name} alone.{part}": tensor for part, tensor in parts_of(alone).items()}
        return present(outputs)

    given = _arguments(case, inputs)
    drawn = [f"{name}{alone}.codes" for name in HALVES for alone in ("", " alone")] if own else []
    outputs, protection, seconds = repeated(backend, x.device, given, call, drawn)
    words = inputs.random("xT")
    bits, amaxes = _bits_of_halves(random, given), _amaxes_of_halves(given)
    oracles = _made(reference.quantize_both(x, recipe, amax=amaxes, scale=scale, random=bits))
    together = {name: tensor for name, tensor in outputs.items() if " alone" not in name}
    outcome = Outcome(protection, together, seconds=seconds)
    matrix = x.flatten(0, -2)
    subjects = (
        Subject(matrix, recipe.rowwise, random, own=own, amax_given=case.amax),
        columnwise_subject(
            matrix.T.contiguous(), recipe, second_half(random, words), free=rotates_freely(backend), own=own,
            amax_given=case.amax,
        ),
    )  # fmt: skip

    def half(bits: tuple[int, int], number: int) -> Quantized:
        """A half of a further call: made alone if the backend can, since nothing compares these codes."""
        options: dict[str, Any] = {"amax": amaxes, "scale": scale, "random": bits}
        if f"{HALVES[number]} alone.codes" in outputs:
            return only_half(quantize_both(backend, given["x"], recipe, **options | {HALVES[1 - number]: False}))
        return _made(quantize_both(backend, given["x"], recipe, **options))[number]

    for number, (name, subject, oracle) in enumerate(zip(HALVES, subjects, oracles, strict=True)):
        if own:
            subject.draw = _further(backend, random, partial(half, number=number))
        parts = {part: tensor for part in QUANTIZED_PARTS if (tensor := outputs.get(f"{name}.{part}")) is not None}
        kernel = _as_oracle(parts, x, oracle, swizzled=swizzled)
        add_judged(outcome, subject, kernel, oracle, f"{name}.")
    if " alone" in "".join(outputs):
        outcome.stages.append(_halves(outputs, drawn))
    return outcome


def second_half(random: Random | None, words: Random | None = None) -> Random | None:
    """Random bits of the columnwise half from those of the rowwise half: the next offset, or `words` of its own."""
    return (random[0], random[1] + 1) if isinstance(random, tuple) else words


def columnwise_subject(
    matrix: torch.Tensor,
    recipe: Recipe,
    random: Random | None,
    *,
    free: bool,
    own: bool = False,
    amax_given: bool = False,
) -> Subject:
    """The columnwise half of `quantize_both`, as (K, M)."""
    transposed = recipe.candidates != "6" and recipe.block[0] > 1
    return Subject(matrix, recipe, random, transposed=transposed, free=free, own=own, amax_given=amax_given)


def _halves(outputs: Tensors, drawn: Collection[str]) -> StageResult:
    """Check that a half made alone has the same bytes as in a call for both halves, except results in `drawn`."""
    result = StageResult("halves", "exact", 0)
    for name in HALVES:
        for part in QUANTIZED_PARTS:
            alone, beside = outputs.get(f"{name} alone.{part}"), outputs.get(f"{name}.{part}")
            if alone is None or beside is None or not alone.numel() or f"{name}.{part}" in drawn:
                continue
            result.compared += alone.numel()
            a, b = (element_bytes(t) for t in (alone, beside))
            if not torch.equal(a, b):
                different = int((a != b).any(1).sum())
                result.mismatches += different
                of = f"{format_count(different)} of {format_count(alone.numel())} {part}"
                result.sentence = result.sentence or f"{of} of the {name} half differ when it is made alone"
    return result
