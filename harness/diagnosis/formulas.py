"""What stays in high precision: norms, GELU, attention and residuals, by formulas that are wrong in a known way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from narrowgauge.harness.checks.bound import within
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.reference.high_precision.bounded import Bounded

Wrong = tuple[str, str, Callable[[], torch.Tensor]]
"""A cause, its sentence, and what makes the tensor, float64."""
_RELATIVE = 2.0**-18
"""Of a formula in float32, relative to its largest result in a row: some 64 roundings."""


def formula_explanations(outcome: Outcome, wrong: StageResult) -> list[Explanation]:
    """The wrong formulas that the first wrong stage is, to within the roundings of float32 and the one of its dtype."""
    formula = outcome.formula
    if formula is None or formula.stage != wrong.stage:
        return []
    found: dict[str, Explanation] = {}
    for cause, sentence, make in _FORMULAS[formula.name](**formula.given):
        if _fits(formula.found, make()):
            found.setdefault(cause, Explanation(cause, sentence, wrong.stage, exact=True))
    return list(found.values())


def _fits(found: torch.Tensor, value: torch.Tensor) -> bool:
    value = value.reshape(found.shape)
    known = torch.where(value.isfinite(), value, 0.0).abs()
    error = torch.maximum(known, known.amax(-1, keepdim=True)) * _RELATIVE
    return bool(within(found, Bounded(value, error).limits(found.dtype)).all())


def _norms(x: torch.Tensor, gamma: torch.Tensor, added: torch.Tensor | None, kind: str, eps: float) -> Iterator[Wrong]:
    dtype = x.dtype
    x, gamma = x.double(), gamma.double()
    beta = torch.zeros_like(gamma) if added is None else added.double()
    columns = x.shape[1]

    def norm(
        *, centred: bool = kind == "layer", inside: float = eps, outside: float = 0.0, count: int = columns
    ) -> torch.Tensor:
        given = x - x.mean(1, keepdim=True) if centred else x
        return given / ((given.square().sum(1, keepdim=True) / count + inside).sqrt() + outside)

    yield "norm-without-eps", "eps is left out", lambda: norm(inside=0.0) * gamma + beta
    yield "norm-eps-outside-root", "eps is added behind the root", lambda: norm(inside=0.0, outside=eps) * gamma + beta
    yield "norm-unbiased", "the variance is divided by K − 1", lambda: norm(count=columns - 1) * gamma + beta
    yield "norm-of-other-kind", "it is the norm of the other kind", lambda: norm(centred=kind != "layer") * gamma + beta
    yield "norm-without-gamma", "gamma is left out", lambda: norm() + beta
    if added is not None:
        yield "norm-without-beta", "beta is left out", lambda: norm() * gamma
    rounded = norm().to(dtype) * gamma.to(dtype) + beta.to(dtype)
    yield "norm-rounded-early", "what is normalised is rounded before gamma and beta", rounded.double


def _gelus(x: torch.Tensor) -> Iterator[Wrong]:
    x = x.double()
    yield "gelu-by-erf", "GELU is the exact one, by erf", lambda: torch.nn.functional.gelu(x)
    yield "gelu-by-sigmoid", "GELU is x·sigmoid(1.702·x)", lambda: x * torch.sigmoid(1.702 * x)


def _attentions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[Wrong]:
    """Of (batch, heads, S, d); what is found is (batch·S, heads·d)."""
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


def _sums(a: torch.Tensor, b: torch.Tensor, others: dict[str, torch.Tensor]) -> Iterator[Wrong]:
    for name, other in others.items():
        yield "residual-of-other", f"{name} is added in place of the residual", (other.double() + b.double()).clone
    yield "residual-missing", "the residual is not added", b.double
    yield "residual-alone", "the residual is there alone", a.double


_FORMULAS: dict[str, Callable[..., Iterator[Wrong]]] = {
    "norm": _norms, "gelu": _gelus, "attention": _attentions, "residual": _sums,
}  # fmt: skip
