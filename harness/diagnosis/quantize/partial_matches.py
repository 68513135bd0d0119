"""Deviations that explain a part of the wrong bytes, and pairs of them that explain all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay, can_replay_rows
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import STAGES, KernelMatrix
from narrowgauge.harness.diagnosis.search.work_limit import WorkLimit
from narrowgauge.reference.quantize.layout import elements

CANDIDATES = 16
"""Deviations that are tried in pairs: those that explain most of the wrong elements."""
PROBED = 32
"""Deviations that are tried on all rows: those that explain most of the wrong elements of a few rows."""
_PROBE_ROWS = 8
"""Rows from the first wrong row on, and from one in the middle of the wrong rows, on which deviations are ranked."""
LARGEST = 1 << 21
"""Elements of the largest matrices on which pairs are tried."""
EVIDENCE = 4
"""Elements that a deviation of a pair must explain alone. Each is one of 16 codes or more."""
LARGE_SHARE = 0.9
"""Least share of the wrong elements for a partial explanation, which needs twice `EVIDENCE` elements."""


@dataclass(frozen=True)
class PartialMatch:
    """A deviation with some of the wrong elements. The tensors hold the elements of all stages of all matrices."""

    deviation: QuantizeDeviation
    found: torch.Tensor
    """Elements with the deviation, int64 (n,)."""
    share: float
    """Elements with the kernel's wrong bytes, divided by all elements that are wrong or that the deviation changes."""


def partial_matches(
    matrices: Sequence[KernelMatrix], deviations: Sequence[QuantizeDeviation], limit: WorkLimit
) -> list[PartialMatch]:
    """The `CANDIDATES` deviations that explain most, best first. Empty for large matrices and own random bits."""
    if sum(matrix.element_count for matrix in matrices) > LARGEST or matrices[0].subject.own:
        return []
    kernel, right_stages = _kernel_elements(matrices), _right_stages(matrices)
    right, probe = _elements(matrices, right_stages, None), _probe(matrices)
    ranked = []
    for deviation in deviations:
        if not limit.may_compare(probe.kernel.numel()):
            break
        with suppress(ValueError):  # the changed recipe refuses this amax or dtype
            if deviation.exact and (count := probe.count_explained(deviation)):
                ranked.append((count, deviation))
    matches = []
    for _, deviation in sorted(ranked, key=lambda pair: -pair[0])[:PROBED]:
        if not limit.may_compare(kernel.numel()):
            break
        try:
            found = _elements(matrices, right_stages, deviation)
        except ValueError:
            continue
        wrong, changed = kernel != right, found != right
        explained = int((wrong & (found == kernel)).count_nonzero())
        share = explained / int((wrong | changed).count_nonzero())
        if explained >= EVIDENCE:
            matches.append(PartialMatch(deviation, found, share))
    return sorted(matches, key=lambda match: -match.share)[:CANDIDATES]  # a stable sort keeps the simplest first


def explaining_pair(
    matrices: Sequence[KernelMatrix], matches: Sequence[PartialMatch]
) -> tuple[QuantizeDeviation, QuantizeDeviation] | None:
    """Two deviations that together give every byte of the kernel. The first wins where both change an element.

    Each of them must explain at least `EVIDENCE` elements that the other does not change.
    """
    kernel, right = _kernel_elements(matrices), _elements(matrices, _right_stages(matrices), None)
    wrong = kernel != right
    changed = [match.found != right for match in matches]
    mistaken = [by & (match.found != kernel) for by, match in zip(changed, matches, strict=True)]
    firsts = [number for number in range(len(matches)) if not bool(mistaken[number].any())]
    for first in firsts:
        remaining = wrong & ~changed[first]
        for second, by_second in enumerate(changed):
            alone = (changed[first] & ~by_second, by_second & ~changed[first])
            if second == first or bool((remaining & ~by_second).any()) or bool((mistaken[second] & alone[1]).any()):
                continue
            if all(int(mask.count_nonzero()) >= EVIDENCE for mask in alone):
                return matches[first].deviation, matches[second].deviation
    return None


def large_match(matches: Sequence[PartialMatch]) -> PartialMatch | None:
    """The best match, if it explains most of the wrong elements and not all."""
    return matches[0] if matches and LARGE_SHARE <= matches[0].share < 1 else None


def _stages(matrix: KernelMatrix) -> list[str]:
    return [stage for stage in STAGES if stage in matrix.kernel_stages]


def _flat(tensor: torch.Tensor, stage: str, matrix: KernelMatrix) -> torch.Tensor:
    if stage == "codes":
        tensor = elements(tensor, matrix.subject.matrix.shape[1], matrix.subject.recipe)
    return (tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor).flatten().long()


def _kernel_elements(matrices: Sequence[KernelMatrix]) -> torch.Tensor:
    return torch.cat([_flat(m.kernel_stages[stage], stage, m) for m in matrices for stage in _stages(m)])


RightStages = Sequence[dict[str, torch.Tensor]]
"""Elements of the reference by stage, for each matrix."""


def _right_stages(matrices: Sequence[KernelMatrix]) -> RightStages:
    replays = [(matrix, Replay(matrix)) for matrix in matrices]
    return [{s: _flat(right.compute_stage(s), s, matrix) for s in _stages(matrix)} for matrix, right in replays]


def _elements(
    matrices: Sequence[KernelMatrix], right: RightStages, deviation: QuantizeDeviation | None
) -> torch.Tensor:
    """Elements of the reference, with the deviation in the stages that it changes."""
    stages = frozenset() if deviation is None else deviation.stages | deviation.optional_stages
    parts = []
    for matrix, elements_of in zip(matrices, right, strict=True):
        replay = Replay(matrix, deviation)
        for stage, expected in elements_of.items():
            parts.append(_flat(replay.compute_stage(stage), stage, matrix) if stage in stages else expected)
    return torch.cat(parts)


@dataclass(frozen=True)
class _Probe:
    """A few rows with wrong codes or scales: cheap to try. All matrices if there are none."""

    matrices: Sequence[KernelMatrix]
    kernel: torch.Tensor
    right_stages: RightStages
    wrong: torch.Tensor

    def count_explained(self, deviation: QuantizeDeviation) -> float:
        """The wrong elements of the probe that the deviation gives; infinite if it cannot be replayed on rows."""
        if not all(can_replay_rows(deviation, matrix) for matrix in self.matrices):
            return math.inf
        found = _elements(self.matrices, self.right_stages, deviation)
        return int((self.wrong & (found == self.kernel)).count_nonzero())


def _probe(matrices: Sequence[KernelMatrix]) -> _Probe:
    part = _wrong_rows(matrices)
    kernel, right = _kernel_elements(part), _right_stages(part)
    return _Probe(part, kernel, right, kernel != _elements(part, right, None))


def _wrong_rows(matrices: Sequence[KernelMatrix]) -> Sequence[KernelMatrix]:
    for matrix in matrices:
        for stage in ("scales", "codes"):
            if matrix.subject.recipe.whole and stage == "scales":
                continue
            expected = Replay(matrix).compute_stage(stage)
            rows = (expected != matrix.kernel_stages[stage]).any(1).nonzero().flatten().tolist()
            if rows:
                starts = dict.fromkeys(matrix.tile_rows(stage, row).start for row in (rows[0], rows[len(rows) // 2]))
                height = -(-_PROBE_ROWS // matrix.tile_height) * matrix.tile_height
                last = matrix.subject.matrix.shape[0]
                return [matrix.select_rows(slice(start, min(start + height, last))) for start in starts]
    return matrices
