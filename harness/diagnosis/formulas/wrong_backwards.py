"""Wrong formulas of backward passes: norms, activations and attention.

Each gives the interval of the gradients of a float32 kernel with this mistake, derived as that of the correct formula
(`reference.high_precision`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from narrowgauge.harness.diagnosis.formulas.wrong_forwards import WrongFormula, normal_distribution, sigmoid, through
from narrowgauge.reference.high_precision.attention import (
    Softmax,
    attention_backward,
    attention_product,
    causal,
    scores,
)
from narrowgauge.reference.high_precision.bounded import TRUNCATING, Bounded, exactly, rounded_constant
from narrowgauge.reference.high_precision.gelu import CUBIC, gelu_backward, tanh_terms
from narrowgauge.reference.high_precision.norm import Kind, norm_backward, normalised

Gradients = tuple[Bounded, Bounded, Bounded]


def norm_gradients(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, kind: Kind, eps: float, part: int
) -> Iterator[WrongFormula]:
    """Wrong gradients of a norm of x (M, K). `part`: 0 for the gradient of x, 1 for the gradient of gamma."""
    ones, shifted = torch.ones_like(gamma), gamma.float() + 1
    other: Kind = "rms" if kind == "layer" else "layer"

    def gradient(kind: Kind = kind, gamma: torch.Tensor = gamma, eps: float = eps) -> Bounded:
        found = norm_backward(dy, x, gamma, kind, eps)[part]
        assert found is not None
        return found

    yield "norm-without-eps", "eps is left out", lambda: gradient(eps=0.0)
    yield "norm-of-other-kind", "it is the gradient of the norm of the other kind", lambda: gradient(kind=other)
    if part == 1:
        yield (
            "norm-gradient-of-input", "the gradient of gamma is made of x, not of the normalised x",
            lambda: (exactly(dy) * exactly(x)).sum(0),
        )  # fmt: skip
        return
    yield "norm-without-gamma", "gamma is left out", lambda: gradient(gamma=ones)
    yield "norm-gamma-plus-one", "gamma is 1 + gamma", lambda: gradient(gamma=shifted)

    def simplified(*, centred: bool, projected: bool) -> Bounded:
        """r·(g − mean g − x̂·mean(g·x̂)) without one of the means, or without both."""
        unit, r, _ = normalised(x, kind, eps)
        inner = g = exactly(dy) * exactly(gamma)
        if projected:
            inner = inner - unit * (g * unit).mean(1, keepdim=True)
        if centred:
            inner = inner - g.mean(1, keepdim=True)
        return (r * inner).with_roundings(2)

    yield (
        "norm-gradient-without-statistics", "mean and variance are taken for constants: dx is r·dy·gamma",
        lambda: simplified(centred=False, projected=False),
    )  # fmt: skip
    if kind == "layer":
        yield (
            "norm-gradient-without-mean", "the mean is taken for a constant",
            lambda: simplified(centred=False, projected=True),
        )  # fmt: skip
        yield (
            "norm-gradient-without-variance", "the variance is taken for a constant",
            lambda: simplified(centred=True, projected=False),
        )  # fmt: skip


def gelu_gradients(dy: torch.Tensor, x: torch.Tensor) -> Iterator[WrongFormula]:
    """Wrong gradients of GELU at x."""
    gradient, value = exactly(dy), exactly(x)
    one = exactly(torch.ones((), device=x.device))

    def by_erf() -> Bounded:
        """Φ(x) + x·φ(x). A float32 e^(−x²/2) rounds x² and its half, which moves it by x²·2^-24, and itself."""
        density = torch.exp(-(x.double() ** 2) / 2) / math.sqrt(2 * math.pi)
        bounded = Bounded(density, torch.zeros_like(density)).with_roundings(8)
        moved = bounded.with_error(lambda: 2.0**-22 * value.value.square() * density)
        return gradient * (normal_distribution(x) + (value * moved).with_roundings(1))

    def by_sigmoid(factor: float) -> Bounded:
        """s·(1 + z·(1 − s)), z = factor·x, s = sigmoid z."""
        s = sigmoid(x, factor)
        return gradient * (s * (one + value * rounded_constant(factor, x.device) * (one - s))).with_roundings(2)

    yield "gelu-by-erf", "the gradient is that of the exact GELU, by erf", by_erf
    yield "gelu-by-sigmoid", "the gradient is that of x·sigmoid(1.702·x)", lambda: by_sigmoid(1.702)
    yield "gelu-without-cube", "GELU's tanh lacks 0.044715·x³", lambda: gelu_backward(dy, x, cubic=0.0)
    yield (
        "gelu-cube-not-derived", "the derivative of 0.044715·x³ lacks its factor 3",
        lambda: gelu_backward(dy, x, derived_cubic=CUBIC),
    )  # fmt: skip
    yield (
        "gelu-gradient-without-slope", "the derivative of tanh is left out",
        lambda: gradient * tanh_terms(value)[1].times_power_of_two(0.5),
    )  # fmt: skip
    yield "activation-relu", "the gradient is that of ReLU", lambda: exactly(torch.where(x > 0, dy, 0.0))
    yield "activation-silu", "the gradient is that of x·sigmoid(x)", lambda: by_sigmoid(1.0)
    yield "activation-missing", "the gradient of the activation is left out", lambda: gradient


def attention_gradients(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None
) -> Iterator[WrongFormula]:
    """Wrong gradients of attention: q, k, v and `do` (batch, heads, S, d). The results are (batch·S, 3·heads·d)."""
    root = math.sqrt(q.shape[-1])

    def joined(gradients: Gradients) -> Bounded:
        value, error = (
            torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1) for part in parts], 1)
            for parts in zip(*((one.value, one.error) for one in gradients), strict=True)
        )
        return Bounded(value, error)

    def correct() -> Gradients:
        return attention_backward(do, q, k, v, out=out)

    def scaled(factor: float) -> Bounded:
        dq, dk, dv = correct()
        return joined((_times(dq, factor), _times(dk, factor), dv))

    def attend(keep: torch.Tensor, *, row_term: bool = True, narrow: str = "") -> Bounded:
        """As `attention_backward`, with other keys, or with dS = P∘dP. D is computed from P and dP.

        `narrow`: the numbers among S, P, dP and dS that are rounded to bfloat16; the others are float32 numbers. Empty:
        dS are float32 numbers or rounded. P of dV is always either.
        """

        def stored(x: Bounded, name: str) -> Bounded:
            return through(x, torch.bfloat16) if name in narrow.split() else x

        shares, gradient = stored(Softmax(stored(scores(q, k), "S"), keep).shares, "P"), exactly(do)
        dp = stored(attention_product(gradient, exactly(v).mT, do.dtype), "dP")
        terms = dp - (shares * dp).sum(-1, keepdim=True, roundoff=TRUNCATING) if row_term else dp
        ds = stored((shares * terms).with_roundings(2), "dS")
        ds = ds if narrow else ds.rounded(q.dtype)
        dq, dk = (attention_product(a, exactly(b), torch.float32) for a, b in ((ds, k), (ds.mT, q)))
        dv = attention_product(shares.rounded(q.dtype).mT, gradient, torch.float32)
        return joined((_times(dq, 1 / root), _times(dk, 1 / root), dv))

    def ordered(order: tuple[int, int, int]) -> Callable[[], Bounded]:
        return lambda: joined(tuple(correct()[part] for part in order))  # type: ignore[arg-type]

    yield "attention-not-scaled", "the gradients of q and k are not divided by √d", lambda: scaled(root)
    yield "attention-scaled-twice", "the gradients of q and k are divided by d", lambda: scaled(1 / root)
    yield (
        "attention-not-causal", "the weights are computed again without the causal mask",
        lambda: attend(torch.ones_like(causal(q))),
    )  # fmt: skip
    yield (
        "attention-gradient-without-row-term", "the sum of P∘dP over a row is not subtracted from dP",
        lambda: attend(causal(q), row_term=False),
    )  # fmt: skip
    for cause, sentence, narrow in (
        ("attention-scores-through:bf16", "scores are rounded to bfloat16 before the softmax", "S dS"),
        ("attention-gradient-through:bf16", "dP = dO·Vᵀ is rounded to bfloat16", "dP"),
        ("attention-softmax-through:bf16", "scores, softmax and their gradients are rounded to bfloat16", "S P dP dS"),
    ):
        yield cause, sentence, lambda narrow=narrow: attend(causal(q), narrow=narrow)  # type: ignore[misc]
    yield "attention-q-and-k-exchanged", "the gradients of q and k are exchanged", ordered((1, 0, 2))
    yield "attention-k-and-v-exchanged", "the gradients of k and v are exchanged", ordered((0, 2, 1))


def _times(x: Bounded, factor: float) -> Bounded:
    """The product with a power of √d; the interval includes its rounding (`attention_product`)."""
    return Bounded(x.value * factor, lambda: x.error * factor)
