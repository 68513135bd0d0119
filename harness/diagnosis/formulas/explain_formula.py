"""Diagnosis of high-precision stages: known wrong formulas of norms, GELU, attention and residuals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.diagnosis.formulas.wrong_backwards import (
    ATTENTION_GRADIENTS,
    GELU_GRADIENTS,
    NORM_GRADIENTS,
    AttentionGradient,
    GeluGradient,
    NormGradient,
)
from narrowgauge.harness.diagnosis.formulas.wrong_forwards import (
    ATTENTIONS,
    GELUS,
    NORMS,
    RESIDUALS,
    ROW_SUM,
    Attention,
    Gelu,
    Norm,
    Residual,
)
from narrowgauge.harness.diagnosis.search.work_limit import WorkLimit
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.reference.high_precision.attention import Softmax, causal, scores, weighted_mean
from narrowgauge.reference.high_precision.bounded import Bounded, half_ulp

FORMULAS: dict[str, tuple[Callable[..., Any], tuple[Deviation[Any], ...]]] = {
    "norm": (Norm, NORMS), "gelu": (Gelu, GELUS), "attention": (Attention, ATTENTIONS),
    "residual": (Residual, RESIDUALS), "norm-backward": (NormGradient, NORM_GRADIENTS),
    "gelu-backward": (GeluGradient, GELU_GRADIENTS), "attention-backward": (AttentionGradient, ATTENTION_GRADIENTS),
}  # fmt: skip
"""Arguments and wrong formulas by the name of the correct formula."""


_STEPS = 64
"""Work of an element of a formula: about as many operations in float64, on values and on their errors."""


def wrong_formulas(name: str, given: dict[str, Any]) -> Iterator[tuple[Deviation[Any], Callable[[], Bounded]]]:
    """Wrong formulas of the formula `name` with the arguments `given`, and functions to their results."""
    arguments, table = FORMULAS[name]
    of = arguments(**given)
    for row in rows_of(table, of):
        yield row, partial(row.result, of)


def explain_formula(outcome: Outcome, wrong_stage: StageResult, limit: WorkLimit) -> list[Explanation]:
    """Wrong formulas with bounds that contain every element of the output. The right formula's bound does not."""
    formula = outcome.formula
    if formula is None or formula.stage != wrong_stage.stage:
        return []
    explanations: dict[str, Explanation] = {}
    for row, compute in wrong_formulas(formula.name, formula.given):
        if limit.may_try(_STEPS * formula.found.numel()) and _fits(formula.found, compute()):
            explanations.setdefault(row.cause, Explanation.of(row, wrong_stage.stage))
    if (
        formula.name == "attention"
        and not explanations
        and limit.may_try(_STEPS * formula.found.numel())
        and _rows_scaled(formula.found, formula.given)
    ):
        return [Explanation.of(ROW_SUM, wrong_stage.stage)]
    return list(explanations.values())


def _rows_scaled(output: torch.Tensor, given: dict[str, torch.Tensor]) -> bool:
    """Whether the outputs of every query and head lie in the intervals of float32 attention times a positive number,
    which is not 1 for some of them.

    One number per row is unknown, so a row with fewer than 8 outputs of a certain sign is no evidence.
    """
    q, k, v = (given[name] for name in "qkv")
    expected = weighted_mean(Softmax(scores(q, k), causal(q)), v, torch.float32)
    value, error = (part.transpose(1, 2).flatten(0, 2) for part in (expected.value, expected.error))
    found = output.double().reshape(value.shape) * value.sign()
    relative, absolute = half_ulp(output.dtype)
    rounding = found.abs() * 2 * relative + absolute
    certain = value.abs() > 2 * error
    least = ((found - rounding) / (value.abs() + error)).masked_fill(~certain, -torch.inf).amax(-1)
    most = ((found + rounding) / (value.abs() - error)).masked_fill(~certain, torch.inf).amin(-1)
    uncertain = (found.abs() - rounding <= most.unsqueeze(-1) * (value.abs() + error)) | certain
    if bool(((least <= 1) & (most >= 1)).all()):
        return False
    return bool(((least <= most) & (least > 0) & (certain.sum(-1) >= 8)).all() & uncertain.all())


def _fits(output: torch.Tensor, expected: Bounded) -> bool:
    """Whether every element lies in its interval. An element that may overflow has none, and is no evidence."""
    expected = Bounded(expected.value.reshape(output.shape), expected.error.reshape(output.shape))
    return not bool(expected.unbounded.any()) and bool(within_bounds(output, expected.limits(output.dtype)).all())
