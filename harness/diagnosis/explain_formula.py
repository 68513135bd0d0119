"""Diagnosis of high-precision stages: known wrong formulas of norms, GELU, attention and residuals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.diagnosis.search.time_limit import TimeLimit
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.reference.high_precision.attention import Softmax, attention_product, causal, scores, weighted_mean
from narrowgauge.reference.high_precision.bounded import Bounded, exactly, half_ulp
from narrowgauge.reference.high_precision.norm import Kind, norm_forward

WrongFormula = tuple[str, str, Callable[[], torch.Tensor | Bounded]]
"""Cause, sentence, and function to the results: with the bound of a kernel with this formula, or float64 numbers."""
_RELATIVE = 2.0**-18
"""Error bound of a formula without a proved bound, relative to the largest result of a row: about 64 roundings of
float32."""


def explain_formula(outcome: Outcome, wrong_stage: StageResult, limit: TimeLimit) -> list[Explanation]:
    """Wrong formulas with bounds that contain every element of the output. The right formula's bound does not."""
    formula = outcome.formula
    if formula is None or formula.stage != wrong_stage.stage:
        return []
    explanations: dict[str, Explanation] = {}
    for cause, sentence, compute in _FORMULAS[formula.name](**formula.given):
        if limit.may_try() and _fits(formula.found, compute()):
            explanations.setdefault(cause, Explanation(cause, sentence, wrong_stage.stage, exact=True))
    if (
        formula.name == "attention"
        and not explanations
        and limit.may_try()
        and _rows_scaled(formula.found, formula.given)
    ):
        sentence = "each query and head has its expected output times one number: the sum of the weights is wrong"
        return [Explanation("attention-row-sum", sentence, wrong_stage.stage, exact=False)]
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


def _fits(output: torch.Tensor, expected: torch.Tensor | Bounded) -> bool:
    if isinstance(expected, torch.Tensor):
        value = expected.reshape(output.shape)
        magnitude = torch.where(value.isfinite(), value, 0.0).abs()
        expected = Bounded(value, torch.maximum(magnitude, magnitude.amax(-1, keepdim=True)) * _RELATIVE)
    return not bool(expected.unbounded.any()) and bool(within_bounds(output, expected.limits(output.dtype)).all())


def _norm_deviations(
    x: torch.Tensor, gamma: torch.Tensor, added: torch.Tensor | None, kind: Kind, eps: float
) -> Iterator[WrongFormula]:
    dtype = x.dtype
    given, without, shifted = x, torch.ones_like(gamma), gamma.float() + 1
    no_beta = None if added is None else torch.zeros_like(added)
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
    yield "norm-without-gamma", "gamma is left out", lambda: norm_forward(given, without, added, kind, eps)
    yield "norm-gamma-plus-one", "gamma is 1 + gamma", lambda: norm_forward(given, shifted, added, kind, eps)
    if added is not None:
        yield "norm-without-beta", "beta is left out", lambda: norm_forward(given, gamma.to(dtype), no_beta, kind, eps)
    rounded = norm().to(dtype) * gamma.to(dtype) + beta.to(dtype)
    yield "norm-rounded-early", "what is normalised is rounded before gamma and beta", rounded.double


def _gelu_deviations(x: torch.Tensor) -> Iterator[WrongFormula]:
    x = x.double()
    yield "gelu-by-erf", "GELU is the exact one, by erf", lambda: torch.nn.functional.gelu(x)
    yield "gelu-by-sigmoid", "GELU is x·sigmoid(1.702·x)", lambda: x * torch.sigmoid(1.702 * x)
    yield (
        "gelu-without-cube", "GELU's tanh lacks 0.044715·x³",
        lambda: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * x)),
    )  # fmt: skip
    yield "activation-relu", "the activation is ReLU", lambda: x.clamp(min=0)
    yield "activation-silu", "the activation is x·sigmoid(x)", lambda: x * torch.sigmoid(x)
    yield "activation-missing", "the activation is left out", x.clone


def _attention_deviations(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[WrongFormula]:
    """Wrong attention of q, k and v (batch, heads, S, d). Its outputs are (batch·S, heads·d)."""
    heads, length, size = q.shape[1:]

    def joined(out: torch.Tensor) -> torch.Tensor:
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def attend(
        *,
        factor: float = 1 / math.sqrt(size),
        keep: torch.Tensor | None = None,
        given: tuple[torch.Tensor, ...] = (q, k, v),
        through: Callable[[Bounded], Bounded] = lambda x: x,
        join: Callable[[torch.Tensor], torch.Tensor] = joined,
        stored_dtype: torch.dtype = q.dtype,
    ) -> Bounded:
        softmax = Softmax(through(scores(given[0], given[1], factor)), causal(q) if keep is None else keep)
        out = weighted_mean(softmax, given[2], stored_dtype)
        return Bounded(join(out.value), join(out.error))

    yield "attention-not-scaled", "scores are not divided by √d", lambda: attend(factor=1.0)
    yield "attention-scaled-twice", "scores are divided by d", lambda: attend(factor=1 / size)
    everything = torch.ones_like(causal(q))
    yield "attention-not-causal", "queries see the keys behind them", lambda: attend(keep=everything)
    yield (
        "attention-mask-one-late", "queries see one key behind their own",
        lambda: attend(keep=causal(q, future=1)),
    )  # fmt: skip
    for first_row in (torch.nan, 0.0):

        def without_own_key(first_row: float = first_row) -> Bounded:
            keep = causal(q, future=-1)
            keep[..., 0, 0] = True
            out = attend(keep=keep)
            first = (torch.arange(len(out.value), device=q.device) % length == 0).unsqueeze(1)
            return Bounded(out.value.masked_fill(first, first_row), out.error.masked_fill(first, 0.0))

        yield "attention-mask-one-early", "queries do not see their own key", without_own_key
    # q, k and v as they lie in the output of the layer before: (batch, S, 3·heads·d).
    together = torch.stack([q, k, v]).permute(1, 3, 0, 2, 4)
    for cause, sentence, shape, order in (
        ("attention-heads-interleaved", "q, k and v are taken head by head, not after one another",
         (heads, 3, size), (3, 0, 2, 1, 4)),
        ("attention-heads-last", "heads are taken as the last dimension of q, k and v, not before the head size",
         (3, size, heads), (2, 0, 4, 1, 3)),
    ):  # fmt: skip
        taken = together.reshape(*together.shape[:2], *shape).permute(*order)
        if heads > 1:
            yield cause, sentence, lambda taken=taken: attend(given=tuple(taken))  # type: ignore[misc]
    for cause, sentence, given in (
        ("attention-q-and-k-exchanged", "q and k are exchanged", (k, q, v)),
        ("attention-k-and-v-exchanged", "k and v are exchanged", (q, v, k)),
    ):
        yield cause, sentence, lambda given=given: attend(given=given)  # type: ignore[misc]
    if heads > 1 and length > 1:
        yield (
            "attention-output-not-transposed", "the heads of the output are not joined row by row",
            lambda: attend(join=lambda out: out.reshape(-1, heads * size)),
        )  # fmt: skip
    yield (
        "attention-scores-through:bf16", "scores are rounded to bfloat16 before the softmax",
        lambda: attend(through=_through_bfloat16, stored_dtype=torch.float32),
    )  # fmt: skip

    def softmax_in_bfloat16() -> Bounded:
        shares = _through_bfloat16(Softmax(_through_bfloat16(scores(q, k)), causal(q)).shares)
        out = attention_product(shares, exactly(v), torch.float32)
        return Bounded(joined(out.value), joined(out.error))

    yield (
        "attention-softmax-through:bf16", "scores and softmax are rounded to bfloat16", softmax_in_bfloat16,
    )  # fmt: skip


def _through_bfloat16(x: Bounded) -> Bounded:
    """The numbers rounded to bfloat16: rounding is monotone, so the ends of an interval become the ends."""
    low, high = (end.double() for end in x.interval(torch.bfloat16))
    return Bounded((low + high) / 2, (high - low) / 2)


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
