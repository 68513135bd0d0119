"""Diagnosis of high-precision stages: known wrong formulas of norms, GELU, attention and residuals."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.diagnosis.search.time_limit import TimeLimit
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.reference.high_precision.bounded import Bounded

WrongFormula = tuple[str, str, Callable[[], torch.Tensor]]
"""Cause, sentence, and function to the tensor (float64)."""
_RELATIVE = 2.0**-18
"""Error bound of a formula in float32, relative to the largest result of a row: about 64 roundings."""


def explain_formula(outcome: Outcome, wrong_stage: StageResult, limit: TimeLimit) -> list[Explanation]:
    """Wrong formulas that fit the output, up to rounding errors of float32 and the final rounding to the dtype."""
    formula = outcome.formula
    if formula is None or formula.stage != wrong_stage.stage:
        return []
    explanations: dict[str, Explanation] = {}
    for cause, sentence, compute in _FORMULAS[formula.name](**formula.given):
        if limit.may_try() and _fits(formula.found, compute()):
            explanations.setdefault(cause, Explanation(cause, sentence, wrong_stage.stage, exact=True))
    return list(explanations.values())


def _fits(output: torch.Tensor, value: torch.Tensor) -> bool:
    value = value.reshape(output.shape)
    magnitude = torch.where(value.isfinite(), value, 0.0).abs()
    error = torch.maximum(magnitude, magnitude.amax(-1, keepdim=True)) * _RELATIVE
    return bool(within_bounds(output, Bounded(value, error).limits(output.dtype)).all())


def _norm_deviations(
    x: torch.Tensor, gamma: torch.Tensor, added: torch.Tensor | None, kind: str, eps: float
) -> Iterator[WrongFormula]:
    dtype = x.dtype
    x, gamma = x.double(), gamma.double()
    beta = torch.zeros_like(gamma) if added is None else added.double()
    columns = x.shape[1]

    def norm(
        *, centred: bool = kind == "layer", inside: float = eps, outside: float = 0.0, count: int = columns
    ) -> torch.Tensor:
        centred_x = x - x.mean(1, keepdim=True) if centred else x
        return centred_x / ((centred_x.square().sum(1, keepdim=True) / count + inside).sqrt() + outside)

    yield "norm-without-eps", "eps is left out", lambda: norm(inside=0.0) * gamma + beta
    yield "norm-eps-outside-root", "eps is added behind the root", lambda: norm(inside=0.0, outside=eps) * gamma + beta
    yield "norm-unbiased", "the variance is divided by K − 1", lambda: norm(count=columns - 1) * gamma + beta
    yield "norm-of-other-kind", "it is the norm of the other kind", lambda: norm(centred=kind != "layer") * gamma + beta
    yield "norm-without-gamma", "gamma is left out", lambda: norm() + beta
    if added is not None:
        yield "norm-without-beta", "beta is left out", lambda: norm() * gamma
    rounded = norm().to(dtype) * gamma.to(dtype) + beta.to(dtype)
    yield "norm-rounded-early", "what is normalised is rounded before gamma and beta", rounded.double


def _gelu_deviations(x: torch.Tensor) -> Iterator[WrongFormula]:
    x = x.double()
    yield "gelu-by-erf", "GELU is the exact one, by erf", lambda: torch.nn.functional.gelu(x)
    yield "gelu-by-sigmoid", "GELU is x·sigmoid(1.702·x)", lambda: x * torch.sigmoid(1.702 * x)


def _attention_deviations(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[WrongFormula]:
    """Wrong attention of q, k and v (batch, heads, S, d). Its outputs are (batch·S, heads·d)."""
    q, k, v = q.double(), k.double(), v.double()
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)

    def attend(scale: float, *, causal: bool = True) -> torch.Tensor:
        scores = q @ k.mT * scale
        out = (scores.masked_fill(future, -torch.inf) if causal else scores).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    size = q.shape[-1]
    yield "attention-not-scaled", "scores are not divided by √d", lambda: attend(1.0)
    yield "attention-scaled-twice", "scores are divided by d", lambda: attend(1 / size)
    yield "attention-not-causal", "queries see the keys behind them", lambda: attend(size**-0.5, causal=False)


def _residual_deviations(a: torch.Tensor, b: torch.Tensor, others: dict[str, torch.Tensor]) -> Iterator[WrongFormula]:
    """Wrong sums a + b. `others`: further tensors of the layer, by name."""
    for name, tensor in others.items():
        yield "residual-of-other", f"{name} is added in place of the residual", (tensor.double() + b.double()).clone
    yield "residual-missing", "the residual is not added", b.double
    yield "residual-alone", "the residual is there alone", a.double


_FORMULAS: dict[str, Callable[..., Iterator[WrongFormula]]] = {
    "norm": _norm_deviations, "gelu": _gelu_deviations, "attention": _attention_deviations,
    "residual": _residual_deviations,
}  # fmt: skip
