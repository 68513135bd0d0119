"""Diagnosis of GEMM outputs: known deviations of a GEMM, each replayed on the kernel's operands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import NOT_PROVED, SEPARATE, Explanation
from narrowgauge.harness.diagnosis.gemm.accumulators import NARROW, SCALES_OF_SUM, accumulators
from narrowgauge.harness.diagnosis.gemm.changed_products import ChangedProduct, changed_products
from narrowgauge.harness.diagnosis.gemm.epilogues import EPILOGUES
from narrowgauge.harness.diagnosis.gemm.gain import GAIN, find_gain
from narrowgauge.harness.diagnosis.gemm.gemm_parts import (
    EPILOGUE,
    Ends,
    GemmParts,
    Sums,
    changed_outputs,
    changed_parts,
    correct_epilogue,
    fits,
    split_products,
)
from narrowgauge.harness.diagnosis.gemm.operands import SECTIONS, operand_deviations
from narrowgauge.harness.diagnosis.gemm.other_declarations import (
    ANY_ORDER,
    DECLARATIONS,
    DECODED_TO_FLOAT16,
    ON_PURPOSE,
    ORDER,
    decoded_to_float16,
    may_have_order,
    simulated_orders,
    wrong_reference_outputs,
)
from narrowgauge.harness.diagnosis.gemm.partial_sums import KINDS, OF_ELEMENTS, slice_sums, slice_widths
from narrowgauge.harness.diagnosis.gemm.scale_products import SCALES_MULTIPLIED_FIRST
from narrowgauge.harness.diagnosis.gemm.wider_format import explain_wider_format
from narrowgauge.harness.diagnosis.search.history import SEARCHES, SearchHistory
from narrowgauge.harness.diagnosis.search.work_limit import WorkLimit
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.harness.operations.stages.outcome import Outcome, Product

_SAMPLED_ROWS, _SAMPLED_COLUMNS = 6, 24
"""Wrong rows and columns in the sample on which a deviation is tried first, and as many correct rows and columns."""
_SAMPLED_OF_ROW = 4
"""Wrong outputs of each sampled wrong row whose columns are in the sample too."""
_FEW_ROWS, _FEW_OF_ROW = 4, 2
"""Wrong rows, and wrong outputs of each, on which other orders of a tensor core are tried first."""
_SLAB_OUTPUTS = {"cpu": 1 << 20}
"""Outputs of a slab of rows, by type of device. A single slab on other devices."""
_MAX_SIMULATED_PRODUCTS = 1 << 27
"""Largest number of multiplications, over all sections, for which narrow accumulators are simulated."""
_MAX_PARTIAL_OUTPUTS = 1 << 20
"""Largest number of outputs, over all sections, for which partial sums in 16 bits are tried."""
_LAST_CAUSES = {GAIN.cause, *(row.cause for row in NARROW), *(row.cause for row in KINDS)}
"""Causes that are tried if no deviation fits."""
_LEAST_SHARE, _LEAST_SHARED = 0.8, 16
"""Least share of the wrong outputs, and of the correct ones, that a reported deviation gives; least number of wrong
outputs."""
_LEAST_SEPARATED = 10
"""Outputs of the reference that an exact deviation cannot give. Intervals that hold the reference's outputs hold small
mistakes of any other kind too."""
Match = Deviation[Any]
"""A deviation that fits, and whether it is exact."""
_CORRECT: Deviation[GemmParts] = Deviation("", "", EPILOGUE, correct_epilogue)
_SHARES_VERIFIED = 3
"""Deviations whose share is computed on all outputs."""


def explain_gemm(
    outcome: Outcome,
    wrong_stage: StageResult,
    history: SearchHistory,
    limit: WorkLimit,
    refuted: frozenset[str] = frozenset(),
) -> list[Explanation]:
    """Deviations that fit every output, if `wrong_stage` is the output of a GEMM.

    None if the outputs fit without a deviation: the judge compares the signs of zeros, and deviations leave them free.
    Operands wider than the codes are tried first: no deviation of the codes gives their products.

    A deviation that fits is exact only if it does not fit `_LEAST_SEPARATED` outputs of the reference.

    If no order of summation can round an output, it fits if its bits equal those of the deviation. Otherwise it fits
    if it lies between the ends that the deviation gives for the declared order. A deviation is tried on a sample of
    the outputs first. Recent causes are tried first. After `SEARCHES` searches of these recipes that add nothing, only
    recent causes are tried. Other orders of a declared tensor core are tried before the deviations, and end the search:
    they are simulated and must give every bit.

    If no deviation fits, but the bounds of any order do, the declared order is a possible cause. Otherwise further
    explanations are tried in this order: partial sums in 16 bits, a gain, and narrow accumulators, which are simulated
    and must give every bit; then the changes that every product has. If nothing fits, the deviation that gives most of
    the wrong outputs is reported with its share, and never as exact.
    """
    products = [product for product in outcome.products if product.stage == wrong_stage.stage]
    if not products:
        return []
    wrong_outputs = torch.cat([~within_bounds(product.output, product.limits) for product in products])
    if not bool(wrong_outputs.any()):  # the stage failed for another reason than its bounds
        return []
    search = _Search(split_products(products, wrong_outputs), limit)
    if search.fits(_CORRECT):  # signs of zeros alone, which may follow from an addition and are free in deviations
        declarations, hints = search.other_declarations(products)
        return _explanations(declarations, wrong_stage.stage) + hints
    if wider := explain_wider_format(outcome, wrong_stage, search.products):
        return wider
    recipes = " + ".join(str(q.recipe) for q in (products[0].a, products[0].b))
    if orders := search.simulated_orders(history, (recipes, f"{wrong_stage.stage} order", False)):
        history.remember([deviation.cause for deviation in orders])
        return [Explanation.of(order, wrong_stage.stage) for order in orders]
    deviations = [each for each in gemm_deviations(search.products) if each.cause not in refuted]
    recent = [deviation.cause in history.recent_causes for deviation in deviations]
    matching = {rank for rank, deviation in enumerate(deviations) if recent[rank] and search.fits(deviation)}
    key = (recipes, wrong_stage.stage, bool(matching))
    full_search = history.searches[key] < SEARCHES
    if full_search:
        further = {rank for rank, deviation in enumerate(deviations) if not recent[rank] and search.fits(deviation)}
        matching |= further
        history.searches[key] += not further and not limit.reached
    matches = [replace(deviations[rank], exact=search.separates(deviations[rank])) for rank in sorted(matching)]
    declarations, hints = search.other_declarations(products)
    if not matches and search.fits(ANY_ORDER):  # the wider bounds of further explanations would fit too
        return [Explanation.of(ANY_ORDER, wrong_stage.stage), *_explanations(declarations, wrong_stage.stage), *hints]
    matches.sort(key=lambda match: not match.exact)  # a stable sort keeps the simplest first
    matches += declarations  # last: these weaken the rule
    recently = not _LAST_CAUSES.isdisjoint(history.recent_causes)
    if search.only_signs:  # any change that leaves zeros would fit
        full_search = False
    elif recently or (full_search and not matches):
        last = [replace(match, exact=match.exact and not search.has_few_wrong) for match in search.last_matches()]
        matches = last + matches
    if not matches and full_search:
        matches = search.changed_products()
    explanations = _explanations(matches, wrong_stage.stage)
    history.remember([each.cause for each in explanations])
    if not explanations and full_search:
        explanations = search.largest_share(deviations, wrong_stage.stage)
    return explanations + [hint for hint in hints if hint.cause not in {each.cause for each in explanations}]


def _explanations(matches: Sequence[Match], stage: str) -> list[Explanation]:
    """An explanation for each cause: its first match."""
    first = {match.cause: match for match in reversed(matches)}
    words = f"; fewer than {_LEAST_SEPARATED} outputs{SEPARATE}GEMM"
    return [
        Explanation.of(match if match.exact else replace(match, sentence=match.sentence + words), stage)
        for match in matches
        if first[match.cause] is match
    ]


def gemm_deviations(products: Sequence[GemmParts]) -> Iterator[Deviation[GemmParts]]:
    """All deviations of the products, the most plausible first."""
    first = products[0]
    yield from rows_of(EPILOGUES, first)
    yield from operand_deviations(first)
    yield SCALES_MULTIPLIED_FIRST
    yield SCALES_OF_SUM
    yield from rows_of(SECTIONS, first)
    yield OUTPUT_TRANSPOSED


def _transposed(parts: GemmParts) -> GemmParts | None:
    """The parts with the output that column after column would be. None for a single row or column."""
    shape = parts.output.shape
    return None if min(shape) < 2 else replace(parts, output=parts.output.reshape(shape[::-1]).T.contiguous())


OUTPUT_TRANSPOSED: Deviation[GemmParts] = Deviation(
    "output-transposed", "the output is stored transposed, column after column", "output", _transposed
)
_SAMPLE_PASSES = ("loose sample", "sample")
"""Passes in which a deviation is tried before it is tried on all outputs. Most deviations fail in the first pass."""


@dataclass
class _Search:
    """Search for the deviations that fit the products of an outcome."""

    products: list[GemmParts]
    limit: WorkLimit
    _sums: dict[tuple[int, str | int], Sums] = field(default_factory=dict)
    """Sums of unchanged products, by index of the product, and name of the pass or first row of the slab."""
    _wrong_products: set[int] = field(init=False)
    """Indices of the products with wrong outputs."""
    _samples: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Row and column numbers of the samples, by index of the product."""

    def __post_init__(self) -> None:
        self._wrong_products = {parts.number for parts in self.products if bool(parts.wrong.any())}

    def fits(self, deviation: Deviation[GemmParts]) -> bool:
        """Whether the deviation can give every output. False if the limit of work is reached before all were tried."""
        if not self.limit.may_try(self._of_samples):
            return False
        changed = [changed_parts(deviation, parts) for parts in self.products]
        applicable = [parts for parts in changed if parts is not None]
        if len(applicable) < len(changed):
            return False
        applicable.sort(key=lambda parts: parts.number not in self._wrong_products)
        return all(
            self._part_fits(deviation, parts, parts.select(*self._sample(parts)), pass_name)
            for pass_name in _SAMPLE_PASSES
            for parts in applicable
            if parts.order.accepts_reference or pass_name != _SAMPLE_PASSES[0]  # without loose bounds
        ) and all(
            self.limit.may_verify(deviation.cause, self._work(slab, *slab.output.shape))
            and self._part_fits(deviation, parts, slab, start)
            for parts in applicable
            for start, slab in _slabs(parts)
        )

    @staticmethod
    def _work(parts: GemmParts, rows: int, columns: int) -> float:
        """Work of so many rows and columns of outputs: 128 products take as long as an element of a quantizer."""
        return rows * columns * (1 + parts.left.shape[1] / 128)

    @cached_property
    def only_signs(self) -> bool:
        """Whether every wrong output is a zero with the other sign."""
        return all(
            torch.equal(parts.output[parts.wrong], parts.source.limits.expected[parts.wrong]) for parts in self.products
        )

    @cached_property
    def has_few_wrong(self) -> bool:
        """Whether fewer than `_LEAST_SEPARATED` outputs are wrong."""
        return sum(int(parts.wrong.sum()) for parts in self.products) < _LEAST_SEPARATED

    @cached_property
    def _of_all(self) -> float:
        """Work of all outputs."""
        return sum(self._work(parts, *parts.output.shape) for parts in self.products)

    @cached_property
    def _of_samples(self) -> float:
        """Work of the samples."""
        return sum(self._work(parts, *map(len, self._sample(parts))) for parts in self.products)

    def _part_fits(
        self, deviation: Deviation[GemmParts], parts: GemmParts, selected: GemmParts, key: str | int
    ) -> bool:
        """Whether the deviation can give the selected outputs of `parts`. `key`: name of the pass, or row of the slab.

        Sums are cached if operands and order are unchanged.
        """
        return bool(self._fitting(deviation, parts, selected, key).all())

    def _fitting(
        self, deviation: Deviation[GemmParts], parts: GemmParts, selected: GemmParts, key: str | int
    ) -> torch.Tensor:
        """bool mask of the selected outputs that the deviation can give. `key`: as of `_part_fits`."""
        original = self.products[parts.number]
        if parts.left is not original.left or parts.right is not original.right or parts.order != original.order:
            sums = _sums(selected, key)
        else:
            if (parts.number, key) not in self._sums:
                self._sums[parts.number, key] = _sums(selected, key)
            sums = self._sums[parts.number, key]
        candidates = changed_outputs(deviation, selected, sums.ends)
        return fits(selected.output, candidates, sums.undetermined, sums.ends)

    def separates(self, deviation: Deviation[GemmParts]) -> bool:
        """Whether the deviation cannot give at least `_LEAST_SEPARATED` outputs of the reference."""
        count = 0
        for parts in self.products:
            changed = changed_parts(deviation, replace(parts, output=parts.source.limits.expected))
            assert changed is not None
            for start, slab in _slabs(changed):
                count += int((~self._fitting(deviation, changed, slab, start)).sum())
                if count >= _LEAST_SEPARATED:
                    return True
        return False

    def _sample(self, parts: GemmParts) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column numbers of a sample. All deviations are tried on the same sample."""
        if parts.number not in self._samples:
            self._samples[parts.number] = _sample(parts.wrong)
        return self._samples[parts.number]

    def simulated_orders(self, history: SearchHistory, key: tuple[str, str, bool]) -> list[Deviation[GemmParts]]:
        """Orders of a declared tensor core that give every output. After `SEARCHES` searches without a finding, only
        recent causes are tried. `key`: of these searches in `history`.
        """
        first, columns = self.products[0], max(parts.left.shape[1] for parts in self.products)
        orders = simulated_orders(first.order, columns, first.left.recipe.block[1] if first.promotes else None)
        if history.searches[key] >= SEARCHES:
            recent = {cause.removeprefix("order:") for cause in history.recent_causes}
            orders = [equal for equal in orders if not recent.isdisjoint(equal)]
        found: list[Deviation[GemmParts]] = []
        if not orders:
            return found
        for number in self._wrong_products:
            answers = may_have_order(_few_outputs(self.products[number]), [equal[0] for equal in orders])
            orders = [equal for equal, answer in zip(orders, answers, strict=True) if answer]
        for equal in orders:
            deviations = [ORDER.bound(name, name) for name in equal]
            found += deviations if self.fits(deviations[0]) else []
        if not found and not self.limit.reached:
            history.searches[key] += 1
        return found

    def other_declarations(self, products: Sequence[Product]) -> tuple[list[Match], list[Explanation]]:
        """Declarations under which all outputs are correct, and hints of them.

        A declaration is exact if `_LEAST_SEPARATED` outputs of the kernel are wrong without it, and as many of the
        reference are wrong with it. It is a hint, and no reason for a weaker rule, if fewer outputs of the kernel are
        wrong, or only signs of zeros, or if it leaves outputs undetermined.
        """
        found: list[Match] = []
        hints: list[Explanation] = []

        def add(declaration: Deviation[Any], counts: tuple[int, bool] | None) -> None:
            if counts is None:
                return
            exact = counts[0] >= _LEAST_SEPARATED and not self.has_few_wrong
            if exact or not (self.has_few_wrong or self.only_signs or counts[1]):
                found.append(replace(declaration, exact=exact))
            elif declaration.cause not in {hint.cause for hint in hints}:
                sentence = declaration.sentence.partition(ON_PURPOSE)[0] + NOT_PROVED
                hints.append(Explanation(declaration.cause, sentence, products[0].stage, exact=False))

        for declaration in rows_of(DECLARATIONS, products[0].order):
            if not self.limit.may_try(self._of_all):
                break
            add(declaration, wrong_reference_outputs(declaration, products))
        if not found and self.limit.may_try(self._of_all) and (wrong := decoded_to_float16(self.products)) is not None:
            add(DECODED_TO_FLOAT16, (wrong, False))
        return found, hints

    def last_matches(self) -> list[Match]:
        """Explanations that are tried if no deviation fits."""
        if found := [each for each in OF_ELEMENTS if self.fits(each)]:
            return [replace(each, exact=self.separates(each)) for each in found]
        if partial := self._partial_sums():
            return partial
        if self.limit.may_try(self._of_all) and (gain := find_gain(self.products)) is not None:
            return [gain.row]
        return list(self.narrow_accumulators())

    def _partial_sums(self) -> list[Match]:
        """Partial sums in 16 bits that can give every output, for the first slices that fit."""
        left = self.products[0].left
        declared = any(
            parts.tensor_factors is not None or parts.left.shape[1] != left.shape[1] for parts in self.products
        )
        if declared or sum(parts.output.numel() for parts in self.products) > _MAX_PARTIAL_OUTPUTS:
            return []
        samples = [parts.select(*self._sample(parts)) for parts in self.products]
        for width in slice_widths(left.shape[1], 2 if left.recipe.whole else left.recipe.block[1]):
            if not self.limit.may_try(self._of_all):
                break
            of_samples = [slice_sums(parts, width) for parts in samples]
            kinds = [kind for kind in KINDS if _fit_partial(kind, samples, of_samples)]
            if kinds:
                of_all = [slice_sums(parts, width) for parts in self.products]
                kinds = [kind for kind in kinds if _fit_partial(kind, self.products, of_all)]
            if kinds:
                return [replace(kind, sentence=kind.sentence.format(of=width)) for kind in kinds]
        return []

    def changed_products(self) -> list[Match]:
        """Changes that every product has, and that give every output: first on a sample, then on all outputs."""
        found: list[Match] = []
        declared = any(parts.tensor_factors is not None for parts in self.products)
        for change in () if declared else changed_products(self.products):
            if not self.limit.may_try(self._of_samples):
                break
            if self._all_fit(change, sampled=True) and self.limit.may_verify(change.row.cause, self._of_all):
                found += [replace(change.row, exact=self._is_separate(change))] if self._all_fit(change) else []
        return found

    def _all_fit(self, change: ChangedProduct, *, sampled: bool = False) -> bool:
        places = [self._sample(parts) if sampled else _all_places(parts) for parts in self.products]
        masks = (change.fitting(*pair) for pair in zip(self.products, places, strict=True))
        return all(mask is not None and bool(mask.all()) for mask in masks)

    def _is_separate(self, change: ChangedProduct) -> bool:
        """Whether the change cannot give at least `_LEAST_SEPARATED` outputs of the reference."""
        count = 0
        for parts in self.products:
            mask = change.fitting(replace(parts, output=parts.source.limits.expected), _all_places(parts))
            count += 0 if mask is None else int((~mask).sum())
        return count >= _LEAST_SEPARATED

    def largest_share(self, deviations: Sequence[Deviation[GemmParts]], stage: str) -> list[Explanation]:
        """The deviation that gives most of the wrong outputs, and at least as large a share of the correct ones.

        A deviation that leaves correct outputs unchanged explains a part of the kernel. A deviation of small effect is
        not reported: a random error would fit its interval by chance.
        """
        wrong = sum(int(parts.wrong.sum()) for parts in self.products)
        if wrong < _LEAST_SHARED:
            return []
        best: tuple[float, Deviation[GemmParts]] | None = None
        candidates = []
        for deviation in deviations:
            if not self.limit.may_try(self._of_samples):
                break
            shares = self._shares(deviation, sampled=True)
            if shares is not None and min(shares) >= _LEAST_SHARE:
                candidates.append((min(shares), deviation))
        for _, deviation in sorted(candidates, key=lambda candidate: -candidate[0])[:_SHARES_VERIFIED]:
            verified = self.limit.may_verify(deviation.cause, self._of_all)
            shares = self._shares(deviation, sampled=False) if verified else None
            if shares is not None and min(shares) >= _LEAST_SHARE and (best is None or shares[0] > best[0]):
                best = shares[0], deviation
        if best is None:
            return []
        percent = min(99, int(100 * best[0]))
        sentence = f"explains {percent} % of the wrong outputs, not all: {best[1].sentence}"
        return [Explanation(best[1].cause, sentence, stage, exact=False)]

    def _shares(self, deviation: Deviation[GemmParts], *, sampled: bool) -> tuple[float, float] | None:
        """Shares of the wrong and of the correct outputs that the deviation gives; None if it does not apply."""
        counts = torch.zeros(2, 2, dtype=torch.int64)
        for product in self.products:
            changed = changed_parts(deviation, product)
            if changed is None:
                return None
            parts = changed.select(*self._sample(product)) if sampled else changed
            original = product.select(*self._sample(product)) if sampled else product
            sums = parts.sums()
            fitting = fits(parts.output, changed_outputs(deviation, parts, sums.ends), sums.undetermined, sums.ends)
            for row, mask in enumerate((original.wrong, ~original.wrong)):
                counts[row] += torch.tensor([int((fitting & mask).sum()), int(mask.sum())])
        (fitted, wrong), (kept, correct) = counts.tolist()
        return fitted / max(1, wrong), kept / correct if correct else 1.0

    def narrow_accumulators(self) -> Iterator[Match]:
        """The narrow accumulators that give every bit."""
        if sum(parts.output.numel() * parts.left.shape[1] for parts in self.products) > _MAX_SIMULATED_PRODUCTS:
            return
        samples = [parts.select(*self._sample(parts)) for parts in self.products]
        for accumulator in accumulators(self.products[0].left.recipe.block[1]):
            if (
                self.limit.may_try(self._of_all)
                and all(_gives_output(accumulator.sums(parts), parts) for parts in samples)
                and all(_gives_output(accumulator.sums(parts), parts) for parts in self.products)
            ):
                yield accumulator.row


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


def _all_places(parts: GemmParts) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of all rows and columns."""
    rows, columns = (torch.arange(extent, device=parts.output.device) for extent in parts.output.shape)
    return rows, columns


def _few_outputs(parts: GemmParts) -> GemmParts:
    """A few wrong rows and columns of wrong outputs in them."""
    rows = _spread(parts.wrong.any(1), _FEW_ROWS)
    columns = torch.unique(torch.cat([_spread(parts.wrong[row], _FEW_OF_ROW) for row in rows]))
    return parts.select(rows, columns)


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


def _fit_partial(kind: Deviation[GemmParts], products: Sequence[GemmParts], sums: Sequence[list[Ends]]) -> bool:
    """Whether partial sums of this kind can give every output. `sums`: of the slices of each product."""
    return all(
        bool(fits(parts.output, kind.result(parts, ends), torch.zeros_like(parts.wrong)).all())
        for parts, ends in zip(products, sums, strict=True)
    )


def _gives_output(sums: torch.Tensor | None, parts: GemmParts) -> bool:
    if sums is None:
        return False
    undetermined = torch.zeros_like(parts.wrong)
    return bool(fits(parts.output, correct_epilogue(parts, (sums, sums)), undetermined).all())
