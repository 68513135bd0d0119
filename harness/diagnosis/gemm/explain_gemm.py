"""Diagnosis of GEMM outputs: known deviations of a GEMM, each replayed on the kernel's operands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.diagnosis.gemm.accumulators import NARROW, accumulators, promotion_deviations
from narrowgauge.harness.diagnosis.gemm.epilogues import epilogue_deviations
from narrowgauge.harness.diagnosis.gemm.gemm_parts import (
    GemmDeviation,
    GemmParts,
    Sums,
    correct_epilogue,
    fits,
    split_products,
)
from narrowgauge.harness.diagnosis.gemm.operands import operand_deviations, section_deviations
from narrowgauge.harness.diagnosis.gemm.wider_format import explain_wider_format
from narrowgauge.harness.diagnosis.search.history import SEARCHES, SearchHistory
from narrowgauge.harness.diagnosis.search.time_limit import TimeLimit
from narrowgauge.harness.operations.stages.outcome import Outcome

_SAMPLED_ROWS, _SAMPLED_COLUMNS = 6, 24
"""Wrong rows and columns in the sample on which a deviation is tried first, and as many correct rows and columns."""
_SAMPLED_OF_ROW = 4
"""Wrong outputs of each sampled wrong row whose columns are in the sample too."""
_SLAB_OUTPUTS = {"cpu": 1 << 20}
"""Outputs of a slab of rows, by type of device. A single slab on other devices."""
_MAX_SIMULATED_PRODUCTS = 1 << 27
"""Largest number of multiplications, over all sections, for which narrow accumulators are simulated."""


def explain_gemm(
    outcome: Outcome, wrong_stage: StageResult, history: SearchHistory, limit: TimeLimit
) -> list[Explanation]:
    """Deviations that fit every output, if `wrong_stage` is the output of a GEMM.

    Operands wider than the codes are tried first: no deviation of the codes gives their products.

    If no order of summation can round an output, it fits if its bits equal those of the deviation. Otherwise it fits
    if it lies between the ends that the deviation gives for the declared order. A deviation is tried on a sample of
    the outputs first. Narrow accumulators have no such ends. They are simulated last, if nothing else fits, and must
    give every bit. Recent causes are tried first. After `SEARCHES` searches of these recipes that add nothing, only
    recent causes are tried.
    """
    products = [product for product in outcome.products if product.stage == wrong_stage.stage]
    if not products:
        return []
    wrong_outputs = torch.cat([~within_bounds(product.output, product.limits) for product in products])
    if not bool(wrong_outputs.any()):  # the stage failed for another reason than its bounds
        return []
    search = _Search(split_products(products, wrong_outputs), limit)
    if wider := explain_wider_format(outcome, wrong_stage, search.products):
        return wider
    deviations = list(_deviations(search.products))
    recent = [deviation.cause in history.recent_causes for deviation in deviations]
    matching = {rank for rank, deviation in enumerate(deviations) if recent[rank] and search.fits(deviation)}
    recipes = " + ".join(str(q.recipe) for q in (products[0].a, products[0].b))
    key = (recipes, wrong_stage.stage, bool(matching))
    full_search = history.searches[key] < SEARCHES
    if full_search:
        further = {rank for rank, deviation in enumerate(deviations) if not recent[rank] and search.fits(deviation)}
        matching |= further
        history.searches[key] += not further and not limit.reached
    matches = [(deviations[rank].cause, deviations[rank].sentence) for rank in sorted(matching)]
    if not matches and (full_search or not NARROW.keys().isdisjoint(history.recent_causes)):
        matches = list(search.narrow_accumulators())
    sentences = dict(reversed(matches))
    causes = list(dict.fromkeys(cause for cause, _ in matches))
    history.remember(causes)
    return [Explanation(cause, sentences[cause], wrong_stage.stage, exact=True) for cause in causes]


def _deviations(products: Sequence[GemmParts]) -> Iterator[GemmDeviation]:
    """All deviations of the products, the most plausible first."""
    yield GemmDeviation("order-not-declared", "sums are right in some order, not in the declared one", _any_order)
    yield from epilogue_deviations()
    yield from operand_deviations()
    yield from promotion_deviations()
    if len(products) > 1:
        yield from section_deviations()
    yield GemmDeviation("output-transposed", "the output is transposed", _transposed)


def _any_order(parts: GemmParts) -> GemmParts | None:
    return None if parts.any_order.order == parts.order else parts.any_order


def _transposed(parts: GemmParts) -> GemmParts | None:
    """The parts with the transposed output. None if the output is not square."""
    output = parts.source.output
    if output.shape[0] != output.shape[1]:
        return None
    return replace(parts, output=output.T.contiguous())


_SAMPLE_PASSES = ("loose sample", "sample")
"""Passes in which a deviation is tried before it is tried on all outputs. Most deviations fail in the first pass."""


@dataclass
class _Search:
    """Search for the deviations that fit the products of an outcome."""

    products: list[GemmParts]
    limit: TimeLimit
    _sums: dict[tuple[int, str | int], Sums] = field(default_factory=dict)
    """Sums of unchanged products, by index of the product, and name of the pass or first row of the slab."""
    _wrong_products: set[int] = field(init=False)
    """Indices of the products with wrong outputs."""
    _samples: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Row and column numbers of the samples, by index of the product."""

    def __post_init__(self) -> None:
        self._wrong_products = {parts.number for parts in self.products if bool(parts.wrong.any())}

    def fits(self, deviation: GemmDeviation) -> bool:
        """Whether the deviation can give every output. False if the time limit is reached before all were tried."""
        if not self.limit.may_try():
            return False
        changed = [deviation.change(parts) for parts in self.products]
        applicable = [parts for parts in changed if parts is not None]
        if len(applicable) < len(changed):
            return False
        applicable.sort(key=lambda parts: parts.number not in self._wrong_products)
        return all(
            self._part_fits(deviation, parts, parts.select(*self._sample(parts)), pass_name)
            for pass_name in _SAMPLE_PASSES
            for parts in applicable
        ) and all(
            self.limit.may_verify(deviation.cause) and self._part_fits(deviation, parts, slab, start)
            for parts in applicable
            for start, slab in _slabs(parts)
        )

    def _part_fits(self, deviation: GemmDeviation, parts: GemmParts, selected: GemmParts, key: str | int) -> bool:
        """Whether the deviation can give the selected outputs of `parts`. `key`: name of the pass, or row of the slab.

        Sums are cached if operands and order are unchanged.
        """
        original = self.products[parts.number]
        if parts.left is not original.left or parts.right is not original.right or parts.order != original.order:
            sums = _sums(selected, key)
        else:
            if (parts.number, key) not in self._sums:
                self._sums[parts.number, key] = _sums(selected, key)
            sums = self._sums[parts.number, key]
        return bool(fits(selected.output, deviation.epilogue(selected, sums.ends), sums.undetermined).all())

    def _sample(self, parts: GemmParts) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column numbers of a sample. All deviations are tried on the same sample."""
        if parts.number not in self._samples:
            self._samples[parts.number] = _sample(parts.wrong)
        return self._samples[parts.number]

    def narrow_accumulators(self) -> Iterator[tuple[str, str]]:
        """Cause and sentence of the narrow accumulators that give every bit."""
        if sum(parts.output.numel() * parts.left.shape[1] for parts in self.products) > _MAX_SIMULATED_PRODUCTS:
            return
        samples = [parts.select(*self._sample(parts)) for parts in self.products]
        for accumulator in accumulators(self.products[0].left.recipe.block[1]):
            if (
                self.limit.may_try()
                and all(_gives_output(accumulator.sums(parts), parts) for parts in samples)
                and all(_gives_output(accumulator.sums(parts), parts) for parts in self.products)
            ):
                yield accumulator.cause, accumulator.sentence


def _sums(parts: GemmParts, key: str | int) -> Sums:
    return parts.loose_sums() if key == "loose sample" else parts.sums()


def _sample(wrong: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column numbers of a sample: wrong rows and columns, evenly spread, and as many correct ones.

    The columns include columns of wrong outputs in the sampled rows: if few outputs are wrong, some are in the sample.
    """
    rows, columns = wrong.any(1), wrong.any(0)
    wrong_rows = _spread(rows, _SAMPLED_ROWS)
    of_rows = [_spread(wrong[row], _SAMPLED_OF_ROW) for row in wrong_rows]
    sampled_columns = [_spread(columns, _SAMPLED_COLUMNS), _spread(~columns, _SAMPLED_COLUMNS), *of_rows]
    sampled_rows = [wrong_rows, _spread(~rows, _SAMPLED_ROWS)]
    return torch.unique(torch.cat(sampled_rows)), torch.unique(torch.cat(sampled_columns))


def _spread(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Numbers of at most `count` True elements, evenly spread."""
    indices = mask.nonzero().flatten()
    return indices[:: -(-len(indices) // count)] if len(indices) else indices


def _slabs(parts: GemmParts) -> Iterator[tuple[int, GemmParts]]:
    """All outputs as slabs of rows: first row, and parts of the slab."""
    rows, columns = parts.output.shape
    step = max(1, _SLAB_OUTPUTS.get(parts.output.device.type, parts.output.numel()) // max(1, columns))
    if step >= rows:
        yield 0, parts
        return
    all_columns = torch.arange(columns, device=parts.output.device)
    for start in range(0, rows, step):
        yield start, parts.select(torch.arange(start, min(start + step, rows), device=parts.output.device), all_columns)


def _gives_output(sums: torch.Tensor | None, parts: GemmParts) -> bool:
    if sums is None:
        return False
    undetermined = torch.zeros_like(parts.wrong)
    return bool(fits(parts.output, correct_epilogue(parts, (sums, sums)), undetermined).all())
