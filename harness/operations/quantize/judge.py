"""Quantize, a matrix or both orientations of a matrix, judged stage by stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.backends.guarded_memory import element_bytes
from narrowgauge.harness.backends.results import QUANTIZED_PARTS, as_quantized
from narrowgauge.harness.cases.axes import block_rows
from narrowgauge.harness.cases.families import CODES
from narrowgauge.harness.cases.sections import band_rows
from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.checks.statistics.correlations import Roundings
from narrowgauge.harness.inputs.inputs import Inputs, laid_out
from narrowgauge.harness.operations.quantize.call import dequantize, quantize_halves
from narrowgauge.harness.operations.quantize.call import quantize as call_quantize
from narrowgauge.harness.operations.quantize.case import SCALE_LAYOUTS, QuantizeCase
from narrowgauge.harness.operations.quantize.given_codes import given_operand
from narrowgauge.harness.operations.quantize.reach import has_coverage, reached
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.black_box import bits_of, makes_own_bits, refuse_words
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
from narrowgauge.harness.operations.stages.rows import FAMILY, Independent, add_rows
from narrowgauge.reference.quantize.layout import elements
from narrowgauge.spec.arguments import split_random
from narrowgauge.spec.quantized import Half, Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.scale_layouts import LINEAR, ScaleLayout


@dataclass(frozen=True)
class Plan:
    """The calls of a case: `quantize` of x, or `quantize_both` for some halves of x."""

    case: QuantizeCase
    inputs: Inputs
    backend: Backend

    @cached_property
    def recipe(self) -> Recipe:
        """Recipe of the case."""
        return self.case.recipes[0]

    @cached_property
    def own(self) -> bool:
        """Whether the backend rounds by random bits of its own."""
        return makes_own_bits(self.backend, self.recipe)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the results, which are prefixes of tensors and stages."""
        return tuple(f"{half}." for half in self.case.halves) if len(self.case.halves) == 2 else ("",)

    @cached_property
    def alone(self) -> dict[Half, str]:
        """Names of the results of the halves made alone."""
        return {half: f"{half}{_ALONE}" for half in self.case.halves} if len(self.case.halves) == 2 else {}

    @cached_property
    def arguments(self) -> Tensors:
        """The tensors that the backend is given, by the names of its arguments."""
        inputs = self.inputs.tensors | {"x": laid_out(self.inputs.x, self.case.view)}
        return {name.replace(".xT", _TRANSPOSE).removesuffix(".x"): tensor for name, tensor in inputs.items()}

    @cached_property
    def drawn(self) -> list[str]:
        """Names of the results that depend on random bits of the backend."""
        names = [*self.names, *self.alone.values()] if self.own else []
        return [f"{name}codes" for name in names]

    def options(self, given: Tensors, bits: tuple[int, int] | None) -> dict[str, Any]:
        """Keyword arguments of the call, from the tensors that are given and seed and offset of Philox."""
        words, amaxes = ((given.get(kind), given.get(kind + _TRANSPOSE)) for kind in ("random", "amax"))
        options = {"amax": amaxes[0], "scale": given.get("scale"), "random": words[0] if bits is None else bits}
        if not self.case.halves:
            return options
        pairs = {"amax": amaxes, "random": words if bits is None else bits}
        return options | {name: None if pair == (None, None) else pair for name, pair in pairs.items()}

    def quantize(self, given: Tensors, bits: tuple[int, int] | None, halves: Sequence[Half] = ()) -> list[Quantized]:
        """The results of one call, of some `halves` of those of the plan alone."""
        options = self.options(given, bits) | {"layout": SCALE_LAYOUTS[self.case.scales]}
        if not self.case.halves:
            return [call_quantize(self.backend, given["x"], self.recipe, **options)]
        return quantize_halves(self.backend, halves or self.case.halves, given["x"], self.recipe, **options)

    def call(self, given: Tensors) -> Tensors:
        """The results of a run by name; of two halves also those of each half alone."""
        if self.own:
            self.backend.host.seed(self.bits)
        outputs = self._named(self.quantize(given, self.bits), self.names)
        for half, name in self.alone.items():
            with suppress(Unsupported):  # a kernel may be able to make only both halves
                outputs |= self._named(self.quantize(given, self.bits, [half]), [name])
        return outputs

    @staticmethod
    def _named(results: Sequence[Quantized], names: Sequence[str]) -> Tensors:
        pairs = zip(names, results, strict=True)
        return present({f"{name}{part}": tensor for name, q in pairs for part, tensor in parts_of(q).items()})

    @property
    def bits(self) -> tuple[int, int] | None:
        """Seed and offset of Philox. None: no random bits, or words among the arguments."""
        return self.inputs.counters.get("x")

    def expected(self) -> Iterator[tuple[Subject, Quantized]]:
        """The matrix of each result, and its quantization by the reference, with linear scales."""
        matrix, free = self.inputs.x.flatten(0, -2), rotates_freely(self.backend)
        given = self.options(self.arguments, self.bits)
        amaxes, random = given["amax"], given["random"]
        parts = [(Half.ROW, self.recipe, amaxes, random)]
        if self.case.halves:
            pairs = (None, None) if amaxes is None else amaxes, split_random(random)
            parts = [(half, half.recipe(self.recipe), *map(half.pick, pairs)) for half in self.case.halves]
        for half, recipe, amax, bits in parts:
            subject = Subject.of_half(
                half, matrix, recipe, bits, free=free, own=self.own, amax_given=self.case.amax
            )  # fmt: skip
            yield subject, reference.quantize_half(half, matrix, recipe, amax, given["scale"], bits)

    def further_codes(self, number: int, outputs: Tensors, call: int) -> torch.Tensor:
        """Codes of a result of a further call, one per element, along the rows that are quantized. A half is made alone
        if possible, since these codes are not compared."""
        assert self.bits is not None
        bits = bits_of(self.bits, call)
        self.backend.host.seed(bits)
        alone = [
            half for half, name in self.alone.items() if half is self.case.halves[number] and f"{name}codes" in outputs
        ]
        results = self.quantize(self.arguments, bits, alone)
        q = results[0 if alone else number]
        return elements(stored_along_rows(q), q.shape[1], q.recipe)


_TRANSPOSE = " of the transpose"
"""End of the names of arguments of the columnwise half."""
_ALONE = " alone."
"""End of the names of a half that is made alone."""


def judge_quantize(case: QuantizeCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge quantize, and dequantize of its result if the backend has it; for usage both, quantize_both."""
    plan = Plan(case, inputs, backend)
    refuse_words(case, backend, plan.recipe)
    outputs, protection, seconds = repeated(backend, inputs.x.device, plan.arguments, plan.call, plan.drawn)
    together = {name: tensor for name, tensor in outputs.items() if _ALONE not in name}
    outcome = Outcome(protection, together, seconds=seconds)
    if case.bands:
        return judge_bands(case, inputs, backend, outcome)
    kernels = []
    halves: list[Roundings] | None = [] if plan.own and len(plan.names) == 2 else None
    for number, (name, (subject, oracle)) in enumerate(zip(plan.names, plan.expected(), strict=True)):
        subject.draw = partial(plan.further_codes, number, outputs) if plan.own else None
        subject.halves = halves
        parts = {part: tensor for part in QUANTIZED_PARTS if (tensor := outputs.get(f"{name}{part}")) is not None}
        kernels.append(_as_oracle(parts, inputs.x, oracle, SCALE_LAYOUTS[case.scales]))
        add_judged(outcome, subject, kernels[-1], oracle, name)
        if case.usage == "rowwise" and has_coverage(plan.recipe):
            outcome.numbers = reached(inputs.x.flatten(0, -2), oracle).pack()
    if len(together) < len(outputs):
        outcome.stages.append(_halves(outputs, plan.drawn))
    if case.usage != "both":
        _dequantized(case, inputs, backend, outcome, kernels[0])
    add_rows(outcome, _rows(plan, outcome.judged[0].oracle.amax), backend)
    return outcome


def run_quantize(case: QuantizeCase, inputs: Inputs, backend: Backend) -> tuple[Tensors, list[StageResult]]:
    """The results in the order of their stages, and the stages of repeated and guarded calls."""
    plan = Plan(case, inputs, backend)
    outputs, stages, _ = repeated(backend, inputs.x.device, plan.arguments, plan.call, plan.drawn)
    order = ("amax", "tensor_scale", "scales", "codes")
    return dict(sorted(outputs.items(), key=lambda pair: order.index(pair[0].rpartition(".")[2]))), stages


def _rows(plan: Plan, amax: torch.Tensor | None) -> Independent | None:
    """The rows of x, or its blocks of rows, with the amax of all of x. None: rows may depend on other rows."""
    case, recipe, x = plan.case, plan.recipe, plan.inputs.x
    height = block_rows(recipe)
    plain = case.inputs == FAMILY and not case.halves and (case.view, case.scales) == ("contiguous", "linear")
    if not plain or x.dim() != 2 or x.shape[0] % height or not has_own_rows(recipe, plan.backend):
        return None
    by_unit, shared = {"x": x}, present({"scale": plan.arguments.get("scale")})
    if recipe.tensor_scale not in ("none", "given") and amax is not None:
        (by_unit if recipe.granularity == "row" else shared)["amax"] = amax

    def run(given: Tensors) -> Tensors:
        own = None if recipe.granularity == "row" else given.get("amax")
        q = call_quantize(plan.backend, given["x"], recipe, amax=own, scale=given.get("scale"))
        found = {"codes": q.codes} if recipe.whole else {"scales": q.scales, "codes": q.codes}
        if plan.backend.has("dequantize") and not bool(no_codes(q).any()):
            with suppress(Unsupported):
                found["values"] = dequantize(plan.backend, replace(q, amax=given.get("amax", q.amax)), x.dtype)
        return found

    return Independent(len(x) // height, by_unit, run, shared, height=height)


def has_own_rows(recipe: Recipe, backend: Backend) -> bool:
    """Whether rows, or blocks of rows, that are quantized under one amax have bytes of their own: no random bits, which
    follow the place of an element, and no sums in an order that is free."""
    return recipe.rounding != "stochastic" and not (recipe.transform and rotates_freely(backend))


def _dequantized(case: QuantizeCase, inputs: Inputs, backend: Backend, outcome: Outcome, kernel: Quantized) -> None:
    """Judge dequantize of the result in the memory layout that quantize gave, as a caller of both methods passes it on.

    Codes with bytes that are no code are not decoded; codes that the case gives are decoded in place of the result.
    """
    given_codes = case.inputs == CODES.name
    shown = outcome.judged[0].kernel
    if not backend.has("dequantize") or (not given_codes and bool(no_codes(shown).any())):
        return
    if given_codes:
        shown = given_operand(inputs.x.flatten(0, -2), kernel.recipe)
    elif kernel.scale_layout == LINEAR:
        shown = replace(shown, codes=kernel.codes, scales=kernel.scales)
    with suppress(Unsupported):  # quantize is judged without dequantize too
        _judge_dequantize(shown, inputs.x.dtype, backend, outcome)


def judge_bands(case: QuantizeCase, inputs: Inputs, backend: Backend, outcome: Outcome) -> Outcome:
    """Judge the bands of a huge matrix, one below the other, and dequantize of the whole result.

    The remaining elements are NaN, left out by the amax: the bands have the bytes of matrices of their own.
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
    add_judged(outcome, subject, _as_oracle(parts, matrix, oracle), oracle)
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


def parts_of(q: Quantized) -> Arguments:
    """The tensors of a Quantized by name; None for a missing amax or tensor scale."""
    return {name: getattr(q, name) for name in QUANTIZED_PARTS}


def _as_oracle(parts: Tensors, x: torch.Tensor, oracle: Quantized, layout: ScaleLayout = LINEAR) -> Quantized:
    """A kernel's parts as the Quantized of the matrix that `oracle` is of, its scales in a layout."""
    return as_quantized(
        parts, x, oracle.recipe, shape=oracle.shape, layout=layout, transposed=oracle.transposed, method="quantize"
    )


def rotates_freely(backend: Backend) -> bool:
    """Whether the backend leaves the order of the additions of its rotation undeclared."""
    return backend.declares.get("transform") != "butterfly"


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


def _halves(outputs: Tensors, drawn: Collection[str]) -> StageResult:
    """Check that a half made alone has the same bytes as in a call for both halves, except results in `drawn`."""
    result = StageResult("halves", "exact", 0)
    for half in Half:
        for part in QUANTIZED_PARTS:
            name = f"{half}.{part}"
            alone, beside = outputs.get(f"{half}{_ALONE}{part}"), outputs.get(name)
            if alone is None or beside is None or not alone.numel() or name in drawn:
                continue
            result.compared += alone.numel()
            a, b = (element_bytes(t) for t in (alone, beside))
            if not torch.equal(a, b):
                different = int((a != b).any(1).sum())
                result.mismatches += different
                of = f"{format_count(different)} of {format_count(alone.numel())} {part}"
                result.sentence = result.sentence or f"{of} of the {half} half differ when it is made alone"
    return result
