"""Products: known deviations of a GEMM, each run again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from narrowgauge.harness.checks.bound import within
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import SEARCHES, Explanation, Tried
from narrowgauge.harness.diagnosis.gemm.accumulators import NARROW, accumulators, promotion_deviations
from narrowgauge.harness.diagnosis.gemm.epilogues import epilogue_deviations
from narrowgauge.harness.diagnosis.gemm.gemm_parts import GemmDeviation, GemmParts, Sums, finish, fits, terms_of
from narrowgauge.harness.diagnosis.gemm.operands import operand_deviations, section_deviations
from narrowgauge.harness.operations.stages.outcome import Outcome

_ROWS, _COLUMNS = 6, 24
"""Wrong rows and columns that a deviation is tried on before all outputs are looked at; and as many of the others."""
_SIMULATED = 1 << 27
"""Products of all sections together for which narrow accumulators are run."""


def product_explanations(outcome: Outcome, wrong: StageResult, memory: Tried) -> list[Explanation]:
    """The known deviations that every output fits, where the first wrong stage is that of a product's outputs.

    An output fits where it is the deviation's own, bit for bit, wherever no order of summation can round; elsewhere
    where it lies between the deviation's own ends, those of the order that is declared. A deviation is tried on a few
    outputs first. Narrow accumulators, which no such ends hold, are run last, where nothing else fits, and must give
    every bit. What explained another case is tried first, and alone once `SEARCHES` of products of these recipes added
    nothing to it.
    """
    products = [one for one in outcome.products if one.stage == wrong.stage]
    if not products:
        return []
    outside = torch.cat([~within(one.output, one.limits) for one in products])
    if not bool(outside.any()):  # what is wrong is not what it holds
        return []
    tried = _Tried(terms_of(products, outside))
    every = list(_deviations(tried.whole))
    found = {rank for rank, one in enumerate(every) if one.cause in memory.recent and tried.fits(one)}
    recipes = " + ".join(str(q.recipe) for q in (products[0].a, products[0].b))
    key = (recipes, wrong.stage, bool(found))
    searched = memory.searches[key] < SEARCHES
    if searched:
        more = {rank for rank, one in enumerate(every) if one.cause not in memory.recent and tried.fits(one)}
        found |= more
        memory.searches[key] += not more
    named = [(every[rank].cause, every[rank].sentence) for rank in sorted(found)]
    if not named and (searched or not NARROW.keys().isdisjoint(memory.recent)):
        named = list(tried.narrow())
    sentences = dict(reversed(named))
    causes = list(dict.fromkeys(cause for cause, _ in named))
    memory.found(causes)
    return [Explanation(cause, sentences[cause], wrong.stage, exact=True) for cause in causes]


def _deviations(terms: Sequence[GemmParts]) -> Iterator[GemmDeviation]:
    yield GemmDeviation("order-not-declared", "sums are right in some order, not in the declared one", _any_order)
    yield from epilogue_deviations()
    yield from operand_deviations()
    yield from promotion_deviations()
    if len(terms) > 1:
        yield from section_deviations()
    yield GemmDeviation("output-transposed", "the output is transposed", _transposed)


def _any_order(terms: GemmParts) -> GemmParts | None:
    return None if terms.any_order.order == terms.order else terms.any_order


def _transposed(terms: GemmParts) -> GemmParts | None:
    """The product whose output, seen as (N, M), is as it should be: of a square one."""
    output = terms.source.output
    if output.shape[0] != output.shape[1]:
        return None
    return replace(terms, output=output.T.contiguous())


_LOOKS = ("some, roughly", "some", "all")
"""Outputs that a deviation is tried on, in this order: most fit none of the first."""


@dataclass
class _Tried:
    """The products of an outcome, and a few outputs of each."""

    whole: list[GemmParts]
    _sums: dict[tuple[int, str], Sums] = field(default_factory=dict)
    """Of products as they are: by number and look."""

    def fits(self, deviation: GemmDeviation) -> bool:
        """Whether every output is one that the deviation can give."""
        changed = [deviation.change(one) for one in self.whole]
        terms = [one for one in changed if one is not None]
        if len(terms) < len(changed):
            return False
        terms.sort(key=lambda one: not bool(one.wrong.any()))
        return all(_all_fit(deviation, *self._of(one, look)) for look in _LOOKS for one in terms)

    def _of(self, terms: GemmParts, look: str) -> tuple[GemmParts, Sums]:
        """The terms that are looked at, and their sums: found once where operands and order are the right ones."""
        some = terms if look == "all" else terms.part(*_sample(terms))
        right = self.whole[terms.number]
        if terms.left is not right.left or terms.right is not right.right or terms.order != right.order:
            return some, _sums(some, look)
        key = (terms.number, look)
        if key not in self._sums:
            self._sums[key] = _sums(some, look)
        return some, self._sums[key]

    def narrow(self) -> Iterator[tuple[str, str]]:
        """Narrow accumulators that give every bit: cause and sentence."""
        if sum(one.output.numel() * one.left.shape[1] for one in self.whole) > _SIMULATED:
            return
        samples = [one.part(*_sample(one)) for one in self.whole]
        for narrow in accumulators(self.whole[0].left.recipe.block[1]):
            if all(_gives(narrow.sums(one), one) for one in samples) and all(
                _gives(narrow.sums(one), one) for one in self.whole
            ):
                yield narrow.cause, narrow.sentence


def _sums(terms: GemmParts, look: str) -> Sums:
    return terms.loose_sums() if look == "some, roughly" else terms.sums()


def _sample(terms: GemmParts) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of rows and columns: those of some wrong outputs, spread over all, and of some others."""
    rows, columns = terms.wrong.any(1), terms.wrong.any(0)
    return _spread(rows, _ROWS), _spread(columns, _COLUMNS)


def _spread(wrong: torch.Tensor, count: int) -> torch.Tensor:
    picked = []
    for mask in (wrong, ~wrong):
        at = mask.nonzero().flatten()
        picked.append(at[:: -(-len(at) // count)] if len(at) else at)
    return torch.cat(picked).sort().values


def _all_fit(deviation: GemmDeviation, terms: GemmParts, sums: Sums) -> bool:
    return bool(fits(terms.output, deviation.finish(terms, sums.ends), sums.undetermined).all())


def _gives(sums: torch.Tensor | None, terms: GemmParts) -> bool:
    if sums is None:
        return False
    no = torch.zeros_like(terms.wrong)
    return bool(fits(terms.output, finish(terms, (sums, sums)), no).all())
