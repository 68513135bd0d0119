"""Quantized matrices: known deviations of a quantizer, each run again."""

from __future__ import annotations

from functools import cached_property

import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import SEARCHES, Explanation, Tried
from narrowgauge.harness.diagnosis.quantize.catalogue import catalogue
from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Run, by_rows
from narrowgauge.harness.diagnosis.quantize.evidence import OF_ROWS, STAGES, Evidence, different, evidence, same
from narrowgauge.harness.operations.stages.outcome import Outcome

MOST = 5
"""Explanations of one wrong stage."""
WORK_OF_A_CASE = 1 << 30
"""Elements times deviations that are looked at for one wrong stage: ten seconds on one core, of 256x1024 0.1."""
WORK = 1 << 34
"""The same of a backend."""


def quantizing_explanations(outcome: Outcome, wrong: StageResult, tried: Tried) -> list[Explanation]:
    """The deviations of a quantizer that give the bytes of all matrices that the stage `wrong` is of.

    Every stage of a matrix is compared, given the kernel's own stage before. Where nothing gives them all, what gives
    the wrong stage alone is named, and that it does no more. The best come first, `MOST` at most: those that assume
    least. Nothing, where the stage is none of a quantized matrix.
    """
    start, point, name = wrong.stage.rpartition(".")
    prefix = start + point
    every_matrix = [evidence(judged) for judged in outcome.judged if judged.prefix == prefix]
    matrices = [matrix for matrix in every_matrix if matrix.elements]
    if name not in STAGES or not matrices:
        return []
    known = {stage.stage for stage in outcome.stages if not stage.right}
    search = _Search(matrices, [stage for stage in STAGES if prefix + stage in known], tried)
    if name not in search.wrong:
        return []
    every = search.explain(search.wrong)
    if every or len(search.wrong) == 1:
        return [_explanation(deviation, wrong.stage, "") for deviation in every]
    others = " and ".join(stage for stage in search.wrong if stage != name)
    words = f"; {others} must have another reason"
    return [_explanation(deviation, wrong.stage, words) for deviation in search.explain([name])]


def _explanation(deviation: QuantizeDeviation, stage: str, words: str) -> Explanation:
    return Explanation(deviation.cause, deviation.sentence + words, stage, deviation.exact)


class _Search:
    """Deviations of some matrices of one recipe, tried one after the other."""

    def __init__(self, matrices: list[Evidence], wrong: list[str], memory: Tried) -> None:
        self.matrices, self.memory = matrices, memory
        self.recipe = matrices[0].subject.recipe
        self.work = 0
        self._masks: dict[str, list[torch.Tensor]] = {}
        # What changes nothing would explain matrices in which nothing is wrong.
        self.wrong = [stage for stage in wrong if any(bool(mask.any()) for mask in self._different(stage))]

    def explain(self, stages: list[str]) -> list[QuantizeDeviation]:
        """The deviations that give these stages, all others that they can change being right, or being no matter.

        Those that gave something before are tried first, and alone once `SEARCHES` of this recipe's stage found
        something; after as many that found nothing, nothing else is tried either.
        """
        whole = stages == self.wrong
        memory, key = self.memory, (str(self.recipe), stages[0] if whole else f"{stages[0]} alone")
        found: list[tuple[int, QuantizeDeviation]] = []
        tried = set()
        every = list(enumerate(self.deviations))
        for rank, deviation in every:
            if deviation.cause in memory.recent:
                tried.add(rank)
                if self._explains(deviation, stages, whole=whole):
                    found.append((rank, deviation))
        exhausted = memory.searches[(*key, bool(found))] >= SEARCHES
        if not exhausted:
            for rank, deviation in every:
                if len({d.cause for _, d in found}) >= MOST:
                    break
                if rank not in tried and self._explains(deviation, stages, whole=whole):
                    found.append((rank, deviation))
            memory.searches[(*key, bool(found))] += 1
        best: dict[str, QuantizeDeviation] = {}
        for _, deviation in sorted(found, key=lambda pair: (not pair[1].exact, pair[0])):
            best.setdefault(deviation.cause, deviation)
        memory.found(list(best)[:MOST])
        return list(best.values())[:MOST]

    @cached_property
    def deviations(self) -> list[QuantizeDeviation]:
        """Every deviation of these matrices, the most plausible first."""
        return catalogue(self.matrices, {stage: self._different(stage) for stage in self.wrong})

    def _different(self, stage: str) -> list[torch.Tensor]:
        if stage not in self._masks:
            self._masks[stage] = [different(matrix.shown[stage], Run(matrix).stage(stage)) for matrix in self.matrices]
        return self._masks[stage]

    @cached_property
    def _probe(self) -> tuple[str, Evidence] | None:
        """The first stage `OF_ROWS` that is wrong, and a few rows of a matrix in which it is."""
        for stage in OF_ROWS:
            if stage not in self.wrong or (self.recipe.whole and stage == "scales"):
                continue
            for matrix, mask in zip(self.matrices, self._different(stage), strict=True):
                rows = mask.any(1).nonzero()
                if len(rows):
                    return stage, matrix.of(matrix.rows(stage, int(rows[0])))
        return None

    def _explains(self, deviation: QuantizeDeviation, stages: list[str], *, whole: bool) -> bool:
        """Whether all matrices have its bytes: in `stages`, and where it is for the `whole`, in all that it changes."""
        can = deviation.stages | deviation.lenient
        if not set(stages) <= can:
            return False
        # Right codes of a kernel that has random bits of its own are right by their distribution alone.
        unknown = "codes" if self.matrices[0].subject.own else ""
        also = deviation.stages - {unknown} if whole else frozenset()
        compared = [stage for stage in STAGES if stage in stages or stage in also]
        try:
            if self._probe is not None and by_rows(deviation, self._probe[1]):
                stage, rows = self._probe
                if stage in compared and not self._gives(deviation, rows, [stage]):
                    return False
            return all(self._gives_all(deviation, matrix, compared) for matrix in self.matrices)
        except ValueError:  # a recipe that refuses an amax, or a dtype
            return False

    def _gives_all(self, deviation: QuantizeDeviation, matrix: Evidence, stages: list[str]) -> bool:
        """Whether a matrix has the deviation's bytes: first its few numbers, then all rows, some at a time."""
        of_rows = [stage for stage in stages if stage in OF_ROWS]
        others = [stage for stage in stages if stage not in OF_ROWS]
        if not by_rows(deviation, matrix):
            return self._gives(deviation, matrix, stages)
        if others and not self._gives(deviation, matrix, others):
            return False
        return not of_rows or all(self._gives(deviation, matrix.of(rows), of_rows) for rows in matrix.slabs())

    def _gives(self, deviation: QuantizeDeviation, matrix: Evidence, stages: list[str]) -> bool:
        cost = max(1, matrix.elements)
        if self.work + cost > WORK_OF_A_CASE or self.memory.work + cost > WORK:
            return False
        self.work += cost
        self.memory.work += cost
        run = Run(matrix, deviation)
        return all(same(run.stage(stage), matrix.shown[stage]) for stage in stages if stage in matrix.shown)
