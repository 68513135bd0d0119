"""Diagnosis of fused outputs: a GEMM that quantizes its output before the output is rounded to its dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import SEPARATE, Explanation
from narrowgauge.harness.diagnosis.gemm.changed_products import changed_products
from narrowgauge.harness.diagnosis.gemm.epilogues import before_last_cast
from narrowgauge.harness.diagnosis.gemm.explain_gemm import gemm_deviations
from narrowgauge.harness.diagnosis.gemm.gemm_parts import (
    Ends,
    GemmParts,
    changed_outputs,
    changed_parts,
    split_products,
)
from narrowgauge.harness.diagnosis.quantize.deviation import Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix, kernel_matrix
from narrowgauge.harness.diagnosis.search.work_limit import WorkLimit
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.harness.operations.stages.oracle import dequantize
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import Subject
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.quantize.layout import elements
from narrowgauge.spec.formats import FP32, Format

_PREFIX = "fused."
_NEAR = 1.02
"""Distance of the decoded matrix from the outputs of a replayed change, in distances of the nearest change: changes by
roundings alone are as near as the right output."""
_REPLAYS = 4
"""Work of an output: both ends are quantized, and their stages compared."""
_LEAST_SEPARATED = 10
"""Different codes of the right output that an exact change must have."""
NOT_CAST: Deviation[GemmParts] = Deviation(
    "fused-output-not-cast", "outputs are quantized in float32, not rounded to {} before", "output"
)


STATISTICS: Deviation[GemmParts] = Deviation("fused-scales-of:{}", "scales are made of other outputs: {}", "output")
"""Scales of a changed product, and codes of the right one."""


def explain_fused_output(outcome: Outcome, wrong_stage: StageResult, limit: WorkLimit) -> list[Explanation]:
    """Changes of the product whose quantized output fits all stages of the fused matrix.

    Float32 sums that are not cast come first, then every deviation of a GEMM. Of these only the ones whose outputs are
    nearest to the decoded matrix are replayed.

    If no order of summation can round a sum, its bytes must be equal. Otherwise the bytes must lie between the results
    for both ends of the sum. A change is exact if at least `_LEAST_SEPARATED` codes of the right output differ.
    If the codes are right under the kernel's scales, the scales alone are searched for.
    """
    matrix = next((kernel_matrix(judged) for judged in outcome.judged if judged.prefix == _PREFIX), None)
    if not wrong_stage.stage.startswith(_PREFIX) or matrix is None or matrix.subject.recipe.transform:
        return []
    (parts,) = split_products(outcome.products, None)
    if any(_all_stages_fit(matrix, ends) for ends in before_last_cast(parts, parts.sums().ends)):
        return [Explanation.of(NOT_CAST.bound(str(parts.dtype).removeprefix("torch.")), wrong_stage.stage)]
    if all(stage.passed for stage in outcome.stages if stage.stage == f"{_PREFIX}codes"):
        return _explain_scales(matrix, parts, wrong_stage, limit)
    values = dequantize(matrix.result).float()
    work = parts.output.numel() * (1 + parts.left.shape[1] / 128)
    distances: list[float] = []
    changes = list(_changes(parts))
    for _, ends_of in changes:
        if not limit.may_try(work):
            return []
        every = [float((values - (low + high) / 2).abs().nan_to_num(0.0).sum()) for low, high in ends_of(True)]
        distances.append(min(every, default=torch.inf))
    found: dict[str, Explanation] = {}
    for (row, ends_of), distance in zip(changes, distances, strict=True):
        if row.cause in found or distance > _NEAR * min(distances) or not limit.may_try(_REPLAYS * work):
            continue
        if ends := next((ends for ends in ends_of(False) if _all_stages_fit(matrix, ends)), None):
            right, changed = (_replayed_stage(matrix, x, "codes") for x in (matrix.subject.matrix, ends[0]))
            found[row.cause] = _explanation(row, right, changed, wrong_stage.stage)
    return list(found.values())


def _explain_scales(
    matrix: KernelMatrix, parts: GemmParts, wrong_stage: StageResult, limit: WorkLimit
) -> list[Explanation]:
    """Changes of the product whose outputs give the amax and the scales of the kernel."""
    work = parts.output.numel() * (1 + parts.left.shape[1] / 128)
    found: dict[str, Explanation] = {}
    for row, ends_of in _changes(parts):
        if row.cause in found or not limit.may_try(work):
            continue
        if not any(_statistics_fit(matrix, ends) for ends in ends_of(True)):
            continue
        if ends := next((ends for ends in ends_of(False) if _statistics_fit(matrix, ends)), None):
            right, changed = (_replayed_stage(matrix, x, "scales") for x in (matrix.subject.matrix, ends[0]))
            words = STATISTICS.cause.format(row.cause), STATISTICS.sentence.format(row.sentence)
            other = replace(row, cause=words[0], sentence=words[1])
            found[row.cause] = _explanation(other, right, changed, wrong_stage.stage)
    return list(found.values())


def _explanation(row: Deviation[Any], right: torch.Tensor, changed: torch.Tensor, stage: str) -> Explanation:
    """The explanation by a change, exact if enough of its codes or scales differ from the right ones."""
    if int((right != changed).sum()) < _LEAST_SEPARATED:
        weak = f"; fewer than {_LEAST_SEPARATED} of them{SEPARATE}kernel"
        row = replace(row, sentence=row.sentence + weak, exact=False)
    return Explanation.of(row, stage)


EndsOf = Callable[[bool], list[Ends]]
"""Ends of the outputs of a changed product, for each permitted epilogue. True: of loose bounds, faster."""


def _changes(parts: GemmParts) -> Iterator[tuple[Deviation[Any], EndsOf]]:
    """Deviations of a GEMM, and changes of its output."""
    plain = parts.sums().ends
    for deviation in gemm_deviations([parts]):
        changed = changed_parts(deviation, parts)
        if changed is not None and changed.output is parts.output:
            yield deviation, partial(_ends_of, deviation, changed, parts, plain)
    for change in changed_products([parts]):
        if not change.side and (ends := change.output_ends(parts)) is not None:
            yield change.row, partial(_same_ends, [ends])


def _ends_of(
    deviation: Deviation[GemmParts], changed: GemmParts, parts: GemmParts, plain: Ends, loose: bool
) -> list[Ends]:
    if changed.left is parts.left and changed.right is parts.right:
        return changed_outputs(deviation, changed, plain)
    return changed_outputs(deviation, changed, (changed.loose_sums() if loose else changed.sums()).ends)


def _same_ends(ends: list[Ends], loose: bool) -> list[Ends]:
    return ends


def _all_stages_fit(matrix: KernelMatrix, ends: Ends) -> bool:
    """Whether every stage of the kernel fits outputs between `ends`, given the kernel's result of the stage before."""
    if not _statistics_fit(matrix, ends):
        return False
    recipe, columns = matrix.subject.recipe, matrix.subject.matrix.shape[1]
    stored = matrix.kernel_stages["codes"], *(_replayed_stage(matrix, end, "codes") for end in ends)
    codes, low_codes, high_codes = (elements(packed, columns, recipe) for packed in stored)
    return _between(codes, low_codes, high_codes, recipe.element)


def _statistics_fit(matrix: KernelMatrix, ends: Ends) -> bool:
    """Whether amax, tensor scale and scales of the kernel fit outputs between `ends`."""
    low, high = ends
    smallest = torch.where((low <= 0) & (high >= 0), 0.0, torch.minimum(low.abs(), high.abs()))
    magnitudes = (smallest, torch.maximum(low.abs(), high.abs()))
    recipe, stages = matrix.subject.recipe, matrix.kernel_stages
    for stage, fmt in (("amax", FP32), ("scales", recipe.scale)):
        if stage not in stages:
            continue
        low_result, high_result = (_replayed_stage(matrix, magnitude, stage) for magnitude in magnitudes)
        if not _between(stages[stage], low_result, high_result, fmt):
            return False
    tensor = stages.get("tensor scale")
    return tensor is None or equal_bits(tensor, Replay(matrix).compute_stage("tensor scale"))


def _replayed_stage(matrix: KernelMatrix, x: torch.Tensor, stage: str) -> torch.Tensor:
    return Replay(replace(matrix, subject=Subject(x, matrix.subject.recipe))).compute_stage(stage)


def _between(actual: torch.Tensor, low: torch.Tensor, high: torch.Tensor, fmt: Format) -> bool:
    """Whether all codes, or numbers, equal their ends if both ends are equal, and lie between different ends."""
    value, first, second = (numbers if fmt is FP32 else decode(numbers, fmt) for numbers in (actual, low, high))
    # A stored inverse of a scale falls with the amax: the second end can be the smaller one.
    smallest, largest = torch.minimum(first, second), torch.maximum(first, second)
    equal = (actual == low) | (value.isnan() & smallest.isnan())
    inside = (value >= smallest) & (value <= largest)
    return bool(torch.where((low == high) | smallest.isnan(), equal, inside).all())
