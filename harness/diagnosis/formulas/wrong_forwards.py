"""Wrong formulas of forward passes: norms, activations, attention and residuals.

Each gives the interval of the results of a float32 kernel with this mistake, derived as that of the correct formula
(`reference.high_precision`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from narrowgauge.reference.high_precision.additions import residual_sum
from narrowgauge.reference.high_precision.attention import Softmax, attention_product, causal, scores, weighted_mean
from narrowgauge.reference.high_precision.bounded import EXP_ULPS, Bounded, exactly, relative_error, rounded_constant
from narrowgauge.reference.high_precision.gelu import gelu_forward
from narrowgauge.reference.high_precision.norm import Kind, norm_forward, normalised
from narrowgauge.spec.summation import SMALLEST_NORMAL, UNIT

WrongFormula = tuple[str, str, Callable[[], Bounded]]
"""Cause, sentence, and function to the results with their bounds."""


def norm_deviations(
    x: torch.Tensor, gamma: torch.Tensor, added: torch.Tensor | None, kind: Kind, eps: float
) -> Iterator[WrongFormula]:
    """Wrong norms of x (M, K)."""
    dtype, ones, shifted = x.dtype, torch.ones_like(gamma), gamma.float() + 1
    other: Kind = "rms" if kind == "layer" else "layer"

    def result(unit: Bounded, store: torch.dtype = torch.float32) -> Bounded:
        """The normalised x times gamma plus beta, as in `norm_forward`. `store`: dtype of results between steps."""
        y = (
            (through(unit, store) * exactly(gamma)).with_roundings(1)
            if store == torch.float32
            else through(through(unit, store) * exactly(gamma), store)
        )
        return y if added is None else y + exactly(added)

    yield "norm-without-eps", "eps is left out", lambda: result(normalised(x, kind, 0.0)[0])
    yield (
        "norm-eps-outside-root", "eps is added behind the root",
        lambda: result(unit_with_root(x, kind, lambda r: _inverse(_inverse(r) + rounded_constant(eps, x.device)))),
    )  # fmt: skip
    if x.shape[1] > 1:
        yield "norm-unbiased", "the variance is divided by K − 1", lambda: result(_unbiased(x, kind, eps))
    yield "norm-of-other-kind", "it is the norm of the other kind", lambda: result(normalised(x, other, eps)[0])
    yield "norm-without-gamma", "gamma is left out", lambda: norm_forward(x, ones, added, kind, eps)
    yield "norm-gamma-plus-one", "gamma is 1 + gamma", lambda: norm_forward(x, shifted, added, kind, eps)
    if added is not None:
        zeros = torch.zeros_like(added)
        yield "norm-without-beta", "beta is left out", lambda: norm_forward(x, gamma, zeros, kind, eps)
    yield (
        "norm-rounded-early", "the normalised x is rounded before gamma and beta",
        lambda: result(normalised(x, kind, eps)[0], dtype),
    )  # fmt: skip


def unit_with_root(x: torch.Tensor, kind: Kind, change: Callable[[Bounded], Bounded]) -> Bounded:
    """The normalised x without eps, with the inverse root of the variance replaced by `change` of it."""
    _, r, mean = normalised(x, kind, 0.0)
    return (exactly(x) if mean is None else exactly(x) - mean) * change(r)


def _inverse(x: Bounded) -> Bounded:
    return exactly(torch.ones((), device=x.value.device)) / x


def _unbiased(x: torch.Tensor, kind: Kind, eps: float) -> Bounded:
    """The normalised x with the sum of squares divided by K − 1.

    1/√(S/(K − 1) + eps) is 1/√(S/K + eps·(K − 1)/K) times √((K − 1)/K), with the same number of roundings.
    """
    rest = (x.shape[1] - 1) / x.shape[1]
    unit = normalised(x, kind, eps * rest)[0]
    return Bounded(unit.value * math.sqrt(rest), lambda: unit.error * math.sqrt(rest)).with_roundings(1)


def gelu_deviations(x: torch.Tensor) -> Iterator[WrongFormula]:
    """Other activations of x."""
    yield "gelu-by-erf", "GELU is the exact GELU, by erf", lambda: exactly(x) * normal_distribution(x)
    yield "gelu-by-sigmoid", "GELU is x·sigmoid(1.702·x)", lambda: exactly(x) * sigmoid(x, 1.702)
    yield "gelu-without-cube", "GELU's tanh lacks 0.044715·x³", lambda: gelu_forward(x, cubic=0.0)
    yield "activation-relu", "the activation is ReLU", lambda: exactly(x.clamp(min=0))
    yield "activation-silu", "the activation is x·sigmoid(x)", lambda: exactly(x) * sigmoid(x)
    yield "activation-missing", "the activation is left out", lambda: exactly(x)


def normal_distribution(x: torch.Tensor) -> Bounded:
    """½·(1 + erf(x/√2))."""
    one = exactly(torch.ones((), device=x.device))
    return (one + (exactly(x) * rounded_constant(math.sqrt(0.5), x.device)).erf()).times_power_of_two(0.5)


def sigmoid(x: torch.Tensor, factor: float = 1.0) -> Bounded:
    """1/(1 + e^(−z)), z = factor·x.

    z has a relative error of 2 units of 2^-24 if the factor is not 1, e^(−z) a relative error of `EXP_ULPS`; both move
    the result s by at most their relative error times s·(1 − s). The sum and the quotient round. Where e^(−z) may
    overflow, s is below the smallest normal number.
    """
    z = x.double() * factor
    s = torch.sigmoid(z)

    def error() -> torch.Tensor:
        moved = (relative_error(EXP_ULPS) + 2 * UNIT * z.abs()) * (1 - s)
        return s * (moved + 2 * UNIT) * (1 + 2.0**-10) + SMALLEST_NORMAL

    return Bounded(s, error)


def through(x: Bounded, dtype: torch.dtype) -> Bounded:
    """The numbers rounded to `dtype`: rounding is monotone, so the ends of an interval become the ends."""
    low, high = (end.double() for end in x.interval(dtype))
    return Bounded((low + high) / 2, (high - low) / 2)


def attention_deviations(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[WrongFormula]:
    """Wrong attention of q, k and v (batch, heads, S, d). Its outputs are (batch·S, heads·d)."""
    heads, length, size = q.shape[1:]

    def joined(out: torch.Tensor) -> torch.Tensor:
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def attend(
        *,
        factor: float = 1 / math.sqrt(size),
        keep: torch.Tensor | None = None,
        given: tuple[torch.Tensor, ...] = (q, k, v),
        store: Callable[[Bounded], Bounded] = lambda x: x,
        join: Callable[[torch.Tensor], torch.Tensor] = joined,
        stored_dtype: torch.dtype = q.dtype,
    ) -> Bounded:
        softmax = Softmax(store(scores(given[0], given[1], factor)), causal(q) if keep is None else keep)
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
        lambda: attend(store=lambda x: through(x, torch.bfloat16), stored_dtype=torch.float32),
    )  # fmt: skip

    def softmax_in_bfloat16() -> Bounded:
        shares = through(Softmax(through(scores(q, k), torch.bfloat16), causal(q)).shares, torch.bfloat16)
        out = attention_product(shares, exactly(v), torch.float32)
        return Bounded(joined(out.value), joined(out.error))

    yield (
        "attention-softmax-through:bf16", "scores and softmax are rounded to bfloat16", softmax_in_bfloat16,
    )  # fmt: skip


def residual_deviations(a: torch.Tensor, b: torch.Tensor, others: dict[str, torch.Tensor]) -> Iterator[WrongFormula]:
    """Wrong sums a + b. `others`: further tensors of the layer, by name."""
    for name, tensor in others.items():
        yield (
            "residual-of-other", f"{name} is added in place of the residual",
            lambda tensor=tensor: residual_sum(tensor, b),  # type: ignore[misc]
        )  # fmt: skip
    yield "residual-missing", "the residual is not added", lambda: exactly(b)
    yield "residual-alone", "the residual is there alone", lambda: exactly(a)
