"""Diagnosis of quantized matrices: known deviations of a quantizer, each replayed on the case's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from narrowgauge.harness.checks.bit_equality import different_bits, equal_bits
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay, can_replay_rows
from narrowgauge.harness.diagnosis.quantize.deviation_list import list_deviations
from narrowgauge.harness.diagnosis.quantize.elements.changed_steps import OF_EVERY_STEP
from narrowgauge.harness.diagnosis.quantize.elements.element_deviations import LEFT_OUT
from narrowgauge.harness.diagnosis.quantize.further_inputs import (
    LARGEST,
    PROOFS,
    RUN,
    FurtherRun,
    refutations,
    separated,
)
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import ROW_STAGES, STAGES, KernelMatrix, kernel_matrix
from narrowgauge.harness.diagnosis.quantize.partial_matches import explaining_pair, large_match, partial_matches
from narrowgauge.harness.diagnosis.quantize.scales.observed_amaxes import (
    PARTIAL,
    TOO_SMALL,
    observed_amax_deviations,
)
from narrowgauge.harness.diagnosis.search.history import (
    SEARCHES,
    Name,
    SearchHistory,
)
from narrowgauge.harness.diagnosis.search.work_limit import WorkLimit
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.possible_cause import GIVES_EVERY_BYTE
from narrowgauge.spec.formats import FP32

BOTH: QuantizeDeviation = Deviation("both:{}", "{1[0]}; and {1[1]}", "several")
SCALES_MOVED: QuantizeDeviation = Deviation(
    "scales-moved", "the scales are the right ones in another order", "scales", exact=False
)
SCALES_CHANGED: QuantizeDeviation = Deviation(
    "scales-stored-wrong", "the stored scales are not those that scaled the elements", "scales", exact=False
)
RIGHT_CODES = "; the codes are those of the right scales"
"""End of the sentence where only the scales are wrong."""
LEAST_WRONG = 10
"""Wrong codes and scales of an exact deviation if the kernel cannot be called on further inputs."""
_IN_NO_PAIR = (*OF_EVERY_STEP, *(each.cause.partition("{")[0] for each in LEFT_OUT))
PAIR_SEARCHES = 3
"""Searches of a stage of a recipe for a pair of deviations, a second each, that find none."""
MAX_EXPLANATIONS = 5
"""Explanations of a wrong stage."""


def explain_quantize(
    outcome: Outcome,
    wrong_stage: StageResult,
    history: SearchHistory,
    limit: WorkLimit,
    further: FurtherRun | None = None,
) -> list[Explanation]:
    """Deviations of a quantizer that give the bytes of all matrices with the stage `wrong_stage`.

    Every stage of a matrix is replayed on the kernel's result of the stage before. A deviation is exact if it gives
    every byte of these matrices, the bytes of the case's other matrices with wrong stages, and the bytes of the case on
    the further inputs of `further`, or without such inputs at least `LEAST_WRONG` wrong elements. If no single
    deviation gives the bytes, pairs of those that explain a part are tried. Codes that are those of the right scales
    are right, and only the scales are explained. If no pair does, the explanations are possible causes: deviations that
    give the bytes of the first wrong stage alone, or the deviation that explains most of the wrong elements. The result
    has at most `MAX_EXPLANATIONS`, the simplest first. It is empty if the stage is not a stage of a quantized matrix.
    """
    start, point, name = wrong_stage.stage.rpartition(".")
    search = _search_of(outcome, start + point, history, limit)
    if search is None or name not in search.wrong_stages:
        return []
    if search.has_right_codes and name == "scales":
        return _of_stored_scales(search, wrong_stage.stage)
    deviations = search.explain(search.wrong_stages)
    if deviations:
        others = _other_matrices(outcome, start + point)
        elsewhere = {prefix: _search_of(outcome, prefix, history, limit) for prefix in others}
        if further is not None:
            deviations = search.confirm(deviations, start + point, further) or search.confirm(
                search.of_places, start + point, further
            )
            if [each.cause for each in deviations] == [TOO_SMALL.cause] and limit.may_compare(RUN):
                deviations = _left_out_parts(further("rising"), start + point, history, limit) or deviations
        simplest = [_with_evidence(each, search.matrices) for each in simplest_of_causes(deviations)]
        explanations = [_explanation_of_all(deviation, wrong_stage.stage, elsewhere) for deviation in simplest]
        if further is None and (few := search.too_few_wrong):
            return [
                replace(each, sentence=each.sentence + few, exact=False) if each.exact else each
                for each in explanations
            ]
        return explanations
    pairs = (str(search.recipe), f"{name} of pairs", False)
    if not search.is_exhausted and history.searches[pairs] < PAIR_SEARCHES:
        alone = [each for each in search.deviations if not each.cause.startswith(_IN_NO_PAIR)]
        matches = partial_matches(search.matrices, alone, limit)
        if (pair := explaining_pair(search.matrices, matches)) is not None:
            return [_explanation_of_pair(*pair, wrong_stage.stage)]
        history.searches[pairs] += not limit.reached
        if len(search.wrong_stages) == 1 and (match := large_match(matches)) is not None:
            share = f"explains {min(100 * match.share, 99.9):.3g} % of the wrong elements"
            sentence = f"{match.deviation.sentence}; {share}"
            return [Explanation(match.deviation.cause, sentence, wrong_stage.stage, exact=False)]
    if len(search.wrong_stages) == 1:
        return []
    unexplained = [stage for stage in search.wrong_stages if stage != name]
    simplest = simplest_of_causes(search.explain([name]))
    return [_with_reason(deviation, wrong_stage.stage, unexplained) for deviation in simplest]


def _left_out_parts(
    outcome: Outcome | None, prefix: str, history: SearchHistory, limit: WorkLimit
) -> list[QuantizeDeviation]:
    """The part that an amax leaves out, if the wrong amaxes of another outcome of the case show it."""
    search = None if outcome is None else _search_of(outcome, prefix, history, limit)
    if search is None or "amax" not in search.wrong_stages:
        return []
    found = observed_amax_deviations(search.matrices, history)
    return [each for each in found if each.cause == PARTIAL.cause]


def _of_stored_scales(search: _Search, stage: str) -> list[Explanation]:
    """What happened to the scales after the codes were made, or a recipe whose codes do not depend on its scales."""
    deviations = [each for each in search.explain(search.wrong_stages) if each.step == "recipe"]
    deviations = [_with_evidence(each, search.matrices) for each in deviations]
    deviations += [each for each in search.explain(["scales"]) if each.step == "scales"]
    found = [Explanation.of(deviation, stage) for deviation in simplest_of_causes(deviations)]
    if not found:
        stored = [matrix.kernel_stages["scales"] for matrix in search.matrices]
        right = [Replay(matrix).compute_stage("scales") for matrix in search.matrices]
        if sum(int(different_bits(*pair).count_nonzero()) for pair in zip(stored, right, strict=True)) < LEAST_WRONG:
            return []  # right codes under few wrong scales may follow from chance
        moved = all(torch.equal(*(t.flatten().sort().values for t in pair)) for pair in zip(stored, right, strict=True))
        found = [Explanation.of(SCALES_MOVED if moved else SCALES_CHANGED, stage)]
    return [replace(each, sentence=each.sentence + RIGHT_CODES) for each in found]


def simplest_of_causes(deviations: Sequence[QuantizeDeviation]) -> list[QuantizeDeviation]:
    """The first deviation of each cause, at most `MAX_EXPLANATIONS`."""
    first = {deviation.cause: deviation for deviation in reversed(deviations)}
    return [each for each in deviations if first[each.cause] is each][:MAX_EXPLANATIONS]


def _with_evidence(deviation: QuantizeDeviation, matrices: Sequence[KernelMatrix]) -> QuantizeDeviation:
    """The deviation. If it replaces the recipe, its sentence has what shows this at once: how many float32 scales are
    powers of two, or the other meaning of the given scale."""
    recipe, other = (Replay(matrices[0], each).recipe for each in (None, deviation))
    words = ""
    if recipe.scale is FP32 and recipe.scale_rounding != "none" and other.scale_rounding == "none":
        scales = torch.cat([matrix.kernel_stages["scales"].flatten() for matrix in matrices])
        count = int((torch.frexp(scales)[0] == 0.5).sum())
        noun = "scale" if scales.numel() == 1 else "scales"
        words = f"; {count or 'none'} of {scales.numel()} {noun} {'is a power' if count < 2 else 'are powers'} of two"
    elif recipe.tensor_scale == "given" and recipe.block_scale != other.block_scale:
        words = f"; the given scale is taken for {'a decode' if other.block_scale == 'given' else 'an encode'} scale"
    return replace(deviation, sentence=deviation.sentence + words)


def _search_of(outcome: Outcome, prefix: str, history: SearchHistory, limit: WorkLimit) -> _Search | None:
    """The search for the matrices whose stages begin with `prefix`, or None if all of them are empty."""
    all_matrices = [kernel_matrix(judged, outcome.judged) for judged in outcome.judged if judged.prefix == prefix]
    matrices = [matrix for matrix in all_matrices if matrix.element_count]
    failed = {stage.stage for stage in outcome.stages if not stage.passed}
    return _Search(matrices, [s for s in STAGES if prefix + s in failed], history, limit) if matrices else None


def _other_matrices(outcome: Outcome, prefix: str) -> list[str]:
    """Prefixes of the other matrices of the case that have wrong stages."""
    failed = {stage.stage for stage in outcome.stages if not stage.passed}
    prefixes = dict.fromkeys(judged.prefix for judged in outcome.judged if judged.prefix != prefix)
    return [other for other in prefixes if any(other + stage in failed for stage in STAGES)]


def _explanation_of_all(
    deviation: QuantizeDeviation, stage: str, elsewhere: Mapping[str, _Search | None]
) -> Explanation:
    """The explanation, exact if the deviation gives the bytes of the other matrices with wrong stages too."""
    unexplained = [
        prefix + wrong
        for prefix, search in elsewhere.items()
        if search is not None and not search.has_cause(deviation.cause)
        for wrong in search.wrong_stages
    ]
    if unexplained:
        return _with_reason(deviation, stage, unexplained)
    return Explanation.of(deviation, stage)


def _with_reason(deviation: QuantizeDeviation, stage: str, unexplained: Sequence[str]) -> Explanation:
    sentence = f"{deviation.sentence}; {' and '.join(unexplained)} must have another reason"
    return Explanation(deviation.cause, sentence, stage, exact=False)


def _explanation_of_pair(first: QuantizeDeviation, second: QuantizeDeviation, stage: str) -> Explanation:
    causes = ",".join(sorted((first.cause, second.cause)))
    return Explanation.of(BOTH.bound(causes, (first.sentence, second.sentence)), stage)


class _Search:
    """Search for the deviations that give the bytes of matrices with the same recipe."""

    def __init__(
        self, matrices: list[KernelMatrix], failed_stages: list[str], history: SearchHistory, limit: WorkLimit
    ) -> None:
        self.matrices, self.history, self.limit = matrices, history, limit
        self.recipe = matrices[0].subject.recipe
        self.of_places: list[QuantizeDeviation] = []
        """Rows and columns of another place that give the bytes as the deviations of the last search do."""
        self.is_exhausted = False
        """Whether enough searches of this recipe and stage found nothing."""
        self._masks: dict[str, list[torch.Tensor]] = {}
        self.has_right_codes = "codes" in failed_stages and all(matrix.right_codes for matrix in matrices)
        # A failed stage can be right in these matrices. A deviation without effect would explain its bytes.
        self.wrong_stages = [s for s in failed_stages if any(bool(mask.any()) for mask in self._wrong_masks(s))]

    def explain(self, stages: list[str]) -> list[QuantizeDeviation]:
        """Deviations that give the bytes of `stages`, the simplest first. A cause can have several.

        If `stages` are all wrong stages, a deviation must also give the bytes of every other stage that it changes.
        Recent causes are tried first. After `SEARCHES` searches of this recipe and stage with a result, only recent
        causes are tried; the same after `SEARCHES` searches without a result.
        """
        all_stages = stages == self.wrong_stages
        history, key = self.history, (str(self.recipe), stages[0] if all_stages else f"{stages[0]} alone")
        matching: list[tuple[int, QuantizeDeviation]] = []
        tried_ranks = set()
        ranked = list(enumerate(self.deviations))
        for rank, deviation in ranked:
            if deviation.cause in history.recent_causes:
                tried_ranks.add(rank)
                if self._explains(deviation, stages, all_stages=all_stages):
                    matching.append((rank, deviation))
        self.is_exhausted = history.searches[(*key, bool(matching))] >= SEARCHES
        if not self.is_exhausted:
            for rank, deviation in ranked:
                if len({match.cause for _, match in matching}) >= MAX_EXPLANATIONS:
                    break
                if rank not in tried_ranks and self._explains(deviation, stages, all_stages=all_stages):
                    matching.append((rank, deviation))
            history.searches[(*key, bool(matching))] += not self.limit.reached
        steps = [match for match in matching if match[1].cause not in OF_EVERY_STEP]
        self.of_places = [match[1] for match in matching if match not in steps] if steps else []
        matching = steps or matching
        found = [deviation for _, deviation in sorted(matching, key=lambda match: (not match[1].exact, match[0]))]
        history.remember([deviation.cause for deviation in simplest_of_causes(found)])
        return found

    def has_cause(self, cause: str) -> bool:
        """Whether a deviation with this cause gives the bytes of all wrong stages."""
        return any(
            deviation.cause == cause and self._explains(deviation, self.wrong_stages, all_stages=True)
            for deviation in self.deviations
        )

    def confirm(self, deviations: list[QuantizeDeviation], prefix: str, further: FurtherRun) -> list[QuantizeDeviation]:
        """The deviations that further inputs do not refute.

        Large matrices, and matrices that are rounded by random bits of the kernel, do not run again. A deviation is
        tried once for each recipe and dtype, up to `PROOFS` times.
        """
        own = any(matrix.subject.own for matrix in self.matrices)  # many calls for each case
        tested = [deviation for deviation in deviations if deviation.exact and not deviation.of_case]
        if not tested or own or sum(matrix.element_count for matrix in self.matrices) > LARGEST:
            return deviations
        where = (str(self.recipe), str(self.matrices[0].subject.matrix.dtype), prefix)
        names = {id(deviation): self._name(deviation) for deviation in tested}
        refuted_by = self.history.refuted_by
        pending = [each for each in tested if not self._is_tested(where, names[id(each)])]
        if pending:
            families = refutations(pending, prefix, further, self.limit)
            proved = not self.limit.note
            refuted_by |= {
                (where, names[id(each)]): by for each, by in zip(pending, families, strict=True) if by or proved
            }
        kept = [each for each in tested if not refuted_by.get((where, names[id(each)]))]
        if len(kept) > 1:
            key: tuple[str | Name, ...] = (where[1], *(names[id(each)] for each in kept))
            if key not in self.history.separated:
                kept = separated(kept, prefix, further, self.limit)
                if not self.limit.note:
                    self.history.separated[key] = [names[id(each)] for each in kept]
            kept = [each for each in kept if names[id(each)] in self.history.separated.get(key, names.values())]
        return [each for each in deviations if each in kept or each not in tested]

    def _name(self, deviation: QuantizeDeviation) -> Name:
        """Cause, sentence, and number among the deviations with the same cause and sentence."""
        name = deviation.cause, deviation.sentence
        alike = [each for each in self.deviations if (each.cause, each.sentence) == name]
        return *name, next(number for number, each in enumerate(alike) if each is deviation)

    def _is_tested(self, where: tuple[str, str, str], name: Name) -> bool:
        """Whether further inputs tested the deviation here, or confirmed it `PROOFS` times without a refutation.

        `where`: recipe, dtype and prefix of the matrices.
        """
        families = [by for (_, other), by in self.history.refuted_by.items() if other == name]
        return (where, name) in self.history.refuted_by or (len(families) >= PROOFS and not any(families))

    @property
    def too_few_wrong(self) -> str:
        """End of the sentence of a deviation that fewer than `LEAST_WRONG` wrong codes and scales show. Empty if there
        are more, or if a number of the tensor is wrong, which has 2^32 values."""
        counts = {
            stage: sum(int(mask.count_nonzero()) for mask in self._wrong_masks(stage)) for stage in self.wrong_stages
        }
        if sum(counts.values()) >= LEAST_WRONG or not set(counts) <= set(ROW_STAGES) or self.recipe.scale is FP32:
            return ""
        return f"{GIVES_EVERY_BYTE}{sum(counts.values())} wrong elements are few, and other mistakes may give them"

    @cached_property
    def deviations(self) -> list[QuantizeDeviation]:
        """All deviations that these matrices can show, the most plausible first."""
        masks = {stage: self._wrong_masks(stage) for stage in self.wrong_stages}
        return list_deviations(self.matrices, masks, self.history)

    def _wrong_masks(self, stage: str) -> list[torch.Tensor]:
        """For each matrix the mask of elements of the stage that differ from the reference."""
        if stage not in self._masks:
            self._masks[stage] = [
                different_bits(matrix.kernel_stages[stage], Replay(matrix).compute_stage(stage))
                for matrix in self.matrices
            ]
        return self._masks[stage]

    @cached_property
    def _probe(self) -> tuple[str, KernelMatrix] | None:
        """The first wrong stage in `ROW_STAGES`, and a tile of a matrix in which it is wrong."""
        for stage in ROW_STAGES:
            if stage not in self.wrong_stages or (self.recipe.whole and stage == "scales"):
                continue
            for matrix, mask in zip(self.matrices, self._wrong_masks(stage), strict=True):
                rows = mask.any(1).nonzero()
                if len(rows):
                    return stage, matrix.select_rows(matrix.tile_rows(stage, int(rows[0])))
        return None

    def _explains(self, deviation: QuantizeDeviation, stages: list[str], *, all_stages: bool) -> bool:
        """Whether the deviation gives the kernel's bytes in `stages`; with `all_stages`, in every stage it changes."""
        if not set(stages) <= deviation.stages | deviation.optional_stages:
            return False
        probe = self._probe if self._probe is not None and can_replay_rows(deviation, self._probe[1]) else None
        if not self.limit.may_try(0 if probe is None else probe[1].element_count):
            return False
        # If the kernel makes its own random bits, its codes cannot equal the reference's codes byte for byte.
        random_stages = {"codes"} if self.matrices[0].subject.own else set()
        further = deviation.stages - random_stages if all_stages else frozenset()
        compared = [stage for stage in STAGES if stage in stages or stage in further]
        try:
            if probe is not None:
                stage, tile = probe
                if stage in compared and not self._matches(deviation, tile, [stage]):
                    return False
            return all(self._matches_in_slabs(deviation, matrix, compared) for matrix in self.matrices)
        except ValueError:  # the changed recipe refuses this amax or dtype
            return False

    def _matches_in_slabs(self, deviation: QuantizeDeviation, matrix: KernelMatrix, stages: list[str]) -> bool:
        """Whether the deviation gives the bytes of the matrix: first of stages without rows, then slab by slab."""
        if not can_replay_rows(deviation, matrix):
            return self._verifies(deviation, matrix, stages)
        row_stages = [stage for stage in stages if stage in ROW_STAGES]
        tensor_stages = [stage for stage in stages if stage not in ROW_STAGES]
        if tensor_stages and not self._verifies(deviation, matrix, tensor_stages):
            return False
        slabs = (matrix.select_rows(rows) for rows in matrix.slabs())
        return not row_stages or all(self._verifies(deviation, slab, row_stages) for slab in slabs)

    def _verifies(self, deviation: QuantizeDeviation, matrix: KernelMatrix, stages: list[str]) -> bool:
        """`_matches`, or False if the limit is reached."""
        may_verify = self.limit.may_verify(deviation.cause, matrix.element_count)
        return may_verify and self._matches(deviation, matrix, stages)

    def _matches(self, deviation: QuantizeDeviation, matrix: KernelMatrix, stages: list[str]) -> bool:
        """Whether the deviation gives the bytes of `stages`."""
        replay = Replay(matrix, deviation)
        shown = [stage for stage in stages if stage in matrix.kernel_stages]
        return all(equal_bits(replay.compute_stage(stage), matrix.kernel_stages[stage]) for stage in shown)
