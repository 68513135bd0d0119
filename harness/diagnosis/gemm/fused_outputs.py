"""Fused outputs: whether what a GEMM quantizes at once is its output before that is rounded."""

from __future__ import annotations

from dataclasses import replace

import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.diagnosis.gemm.gemm_parts import Ends, GemmParts, added, cast, plus, terms_of
from narrowgauge.harness.diagnosis.quantize.deviation import Run
from narrowgauge.harness.diagnosis.quantize.evidence import Evidence, evidence, same
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import Subject
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.quantize.layout import elements
from narrowgauge.spec.formats import FP32, Format

_PREFIX = "fused."


def fusing_explanations(outcome: Outcome, wrong: StageResult) -> list[Explanation]:
    """That sums are quantized in float32, where all stages of the fused matrix fit it.

    They fit where they are what the sums give, byte for byte, wherever no order of summation can round; elsewhere where
    they lie between what the ends of the sums give.
    """
    matrix = next((evidence(judged) for judged in outcome.judged if judged.prefix == _PREFIX), None)
    if not wrong.stage.startswith(_PREFIX) or matrix is None or matrix.subject.recipe.transform:
        return []
    (terms,) = terms_of(outcome.products, None)
    if not any(_fits(matrix, ends) for ends in _unrounded(terms)):
        return []
    words = f"outputs are quantized in float32, not rounded to {str(terms.dtype).removeprefix('torch.')} before"
    return [Explanation("fused-output-not-cast", words, wrong.stage, exact=True)]


def _unrounded(t: GemmParts) -> list[Ends]:
    """Where the outputs lie before their last rounding, in each way in which they can be made."""
    ends = t.sums().ends
    if not t.promotes:
        return added(t, ends, t.factor)
    y = plus(ends, t.bias)
    return [y if t.c is None else plus(cast(y, t.dtype), t.c)]


def _fits(matrix: Evidence, ends: Ends) -> bool:
    """Whether every stage that is shown fits, given what is shown of the stage before."""
    low, high = ends
    nearest = torch.where((low <= 0) & (high >= 0), 0.0, torch.minimum(low.abs(), high.abs()))
    sizes = nearest, torch.maximum(low.abs(), high.abs())
    recipe, shown = matrix.subject.recipe, matrix.shown
    for stage, (one, other), fmt in (("amax", sizes, FP32), ("scales", sizes, recipe.scale)):
        if stage in shown and not _between(shown[stage], _given(matrix, one, stage), _given(matrix, other, stage), fmt):
            return False
    if "tensor scale" in shown and not same(shown["tensor scale"], Run(matrix).stage("tensor scale")):
        return False
    columns = matrix.subject.matrix.shape[1]
    stored = shown["codes"], _given(matrix, low, "codes"), _given(matrix, high, "codes")
    codes, least, most = (elements(each, columns, recipe) for each in stored)
    return _between(codes, least, most, recipe.element)


def _given(matrix: Evidence, x: torch.Tensor, stage: str) -> torch.Tensor:
    return Run(replace(matrix, subject=Subject(x, matrix.subject.recipe))).stage(stage)


def _between(shown: torch.Tensor, low: torch.Tensor, high: torch.Tensor, fmt: Format) -> bool:
    """Whether codes, or numbers, are the ends where these are equal, and lie between them elsewhere."""
    value, least, most = (t if fmt is FP32 else decode(t, fmt) for t in (shown, low, high))
    least, most = torch.minimum(least, most), torch.maximum(least, most)  # a scale that is an inverse falls
    known = low == high
    equal = (shown == low) | (value.isnan() & least.isnan())
    return bool(torch.where(known | least.isnan(), equal, (value >= least) & (value <= most)).all())
