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
from narrowgauge.harness.diagnosis.search_history import SEARCHES, SearchHistory
from narrowgauge.harness.operations.stages.outcome import Outcome

_SAMPLED_ROWS, _SAMPLED_COLUMNS = 6, 24
"""Wrong rows and columns in the sample on which a deviation is tried first, and as many correct rows and columns."""
_MAX_SIMULATED_PRODUCTS = 1 << 27
"""Largest number of multiplications, over all sections, for which narrow accumulators are simulated."""


def explain_gemm(outcome: Outcome, wrong_stage: StageResult, history: SearchHistory) -> list[Explanation]:
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
    search = _Search(split_products(products, wrong_outputs))
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
        history.searches[key] += not further
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


_PASSES = ("loose sample", "sample", "all outputs")
"""Passes in which a deviation is tried. Most deviations fail in the first pass."""


@dataclass
class _Search:
    """Search for the deviations that fit the products of an outcome."""

    products: list[GemmParts]
    _sums: dict[tuple[int, str], Sums] = field(default_factory=dict)
    """Sums of unchanged products, by index of the product and name of the pass."""

    def fits(self, deviation: GemmDeviation) -> bool:
        """Whether the deviation can give every output."""
        changed = [deviation.change(parts) for parts in self.products]
        applicable = [parts for parts in changed if parts is not None]
        if len(applicable) < len(changed):
            return False
        applicable.sort(key=lambda parts: not bool(parts.wrong.any()))
        return all(
            _all_fit(deviation, *self._select(parts, pass_name)) for pass_name in _PASSES for parts in applicable
        )

    def _select(self, parts: GemmParts, pass_name: str) -> tuple[GemmParts, Sums]:
        """Outputs of a pass, and their sums. Sums are cached if operands and order are unchanged."""
        selected = parts if pass_name == "all outputs" else parts.select(*_sample(parts))
        original = self.products[parts.number]
        if parts.left is not original.left or parts.right is not original.right or parts.order != original.order:
            return selected, _sums(selected, pass_name)
        key = (parts.number, pass_name)
        if key not in self._sums:
            self._sums[key] = _sums(selected, pass_name)
        return selected, self._sums[key]

    def narrow_accumulators(self) -> Iterator[tuple[str, str]]:
        """Cause and sentence of the narrow accumulators that give every bit."""
        if sum(parts.output.numel() * parts.left.shape[1] for parts in self.products) > _MAX_SIMULATED_PRODUCTS:
            return
        samples = [parts.select(*_sample(parts)) for parts in self.products]
        for accumulator in accumulators(self.products[0].left.recipe.block[1]):
            if all(_gives_output(accumulator.sums(parts), parts) for parts in samples) and all(
                _gives_output(accumulator.sums(parts), parts) for parts in self.products
            ):
                yield accumulator.cause, accumulator.sentence


def _sums(parts: GemmParts, pass_name: str) -> Sums:
    return parts.loose_sums() if pass_name == "loose sample" else parts.sums()


def _sample(parts: GemmParts) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column numbers of a sample: wrong rows and columns, evenly spread, and as many correct ones."""
    rows, columns = parts.wrong.any(1), parts.wrong.any(0)
    return _spread(rows, _SAMPLED_ROWS), _spread(columns, _SAMPLED_COLUMNS)


def _spread(wrong: torch.Tensor, count: int) -> torch.Tensor:
    sampled = []
    for mask in (wrong, ~wrong):
        indices = mask.nonzero().flatten()
        sampled.append(indices[:: -(-len(indices) // count)] if len(indices) else indices)
    return torch.cat(sampled).sort().values


def _all_fit(deviation: GemmDeviation, parts: GemmParts, sums: Sums) -> bool:
    return bool(fits(parts.output, deviation.epilogue(parts, sums.ends), sums.undetermined).all())


def _gives_output(sums: torch.Tensor | None, parts: GemmParts) -> bool:
    if sums is None:
        return False
    undetermined = torch.zeros_like(parts.wrong)
    return bool(fits(parts.output, correct_epilogue(parts, (sums, sums)), undetermined).all())
