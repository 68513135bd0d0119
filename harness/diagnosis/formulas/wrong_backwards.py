"""Wrong formulas of backward passes: norms, activations and attention.

Each gives the interval of the gradients of a float32 kernel with this mistake, derived as that of the correct formula
(`reference.high_precision`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from narrowgauge.harness.diagnosis.formulas.wrong_forwards import normal_distribution, sigmoid, through
from narrowgauge.harness.operations.stages.deviation import Deviation
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
from narrowgauge.reference.high_precision.quantized_attention import softmax_gradient

Gradients = tuple[Bounded, Bounded, Bounded]


@dataclass(frozen=True)
class NormGradient:
    """The gradient of a norm of x (M, K)."""

    dy: torch.Tensor | Bounded
    x: torch.Tensor
    gamma: torch.Tensor
    kind: Kind
    eps: float
    part: int
    """0 for the gradient of x, 1 for the gradient of gamma."""

    @property
    def other(self) -> Kind:
        """The other kind of norm."""
        return "rms" if self.kind == "layer" else "layer"

    def of(self, kind: Kind, gamma: torch.Tensor, eps: float) -> Bounded:
        """The gradient of a norm with another kind, gamma or eps."""
        found = norm_backward(self.dy, self.x, gamma, kind, eps)[self.part]
        assert found is not None
        return found

    def simplified(self, *, centred: bool, projected: bool) -> Bounded:
        """r·(g − mean g − x̂·mean(g·x̂)) without one of the means, or without both."""
        unit, r, _ = normalised(self.x, self.kind, self.eps)
        inner = g = exactly(self.dy) * exactly(self.gamma)
        if projected:
            inner = inner - unit * (g * unit).mean(1, keepdim=True)
        if centred:
            inner = inner - g.mean(1, keepdim=True)
        return (r * inner).with_roundings(2)


NORM_GRADIENTS: tuple[Deviation[NormGradient], ...] = (
    Deviation("norm-without-eps", "eps is left out", "norm-backward", lambda n: n.of(n.kind, n.gamma, 0.0)),
    Deviation("norm-of-other-kind", "it is the gradient of the norm of the other kind", "norm-backward",
              lambda n: n.of(n.other, n.gamma, n.eps)),
    Deviation("norm-gradient-of-input", "the gradient of gamma is made of x, not of the normalised x", "norm-backward",
              lambda n: (exactly(n.dy) * exactly(n.x)).sum(0), when=lambda n: n.part == 1),
    Deviation("norm-without-gamma", "gamma is left out", "norm-backward",
              lambda n: n.of(n.kind, torch.ones_like(n.gamma), n.eps), when=lambda n: n.part == 0),
    Deviation("norm-gamma-plus-one", "gamma is 1 + gamma", "norm-backward",
              lambda n: n.of(n.kind, n.gamma.float() + 1, n.eps), when=lambda n: n.part == 0),
    Deviation("norm-gradient-without-statistics", "mean and variance are taken for constants: dx is r·dy·gamma",
              "norm-backward", lambda n: n.simplified(centred=False, projected=False), when=lambda n: n.part == 0),
    Deviation("norm-gradient-without-mean", "the mean is taken for a constant", "norm-backward",
              lambda n: n.simplified(centred=False, projected=True),
              when=lambda n: n.part == 0 and n.kind == "layer"),
    Deviation("norm-gradient-without-variance", "the variance is taken for a constant", "norm-backward",
              lambda n: n.simplified(centred=True, projected=False),
              when=lambda n: n.part == 0 and n.kind == "layer"),
)  # fmt: skip
"""Wrong gradients of a norm."""


@dataclass(frozen=True)
class GeluGradient:
    """The gradient of GELU at x."""

    dy: torch.Tensor
    x: torch.Tensor

    def by_erf(self) -> Bounded:
        """Φ(x) + x·φ(x). A float32 e^(−x²/2) rounds x² and its half, which moves it by x²·2^-24, and itself."""
        value = exactly(self.x)
        density = torch.exp(-(self.x.double() ** 2) / 2) / math.sqrt(2 * math.pi)
        bounded = Bounded(density, torch.zeros_like(density)).with_roundings(8)
        moved = bounded.with_error(lambda: 2.0**-22 * value.value.square() * density)
        return exactly(self.dy) * (normal_distribution(self.x) + (value * moved).with_roundings(1))

    def by_sigmoid(self, factor: float) -> Bounded:
        """s·(1 + z·(1 − s)), z = factor·x, s = sigmoid z."""
        s, one = sigmoid(self.x, factor), exactly(torch.ones((), device=self.x.device))
        slope = exactly(self.x) * rounded_constant(factor, self.x.device) * (one - s)
        return exactly(self.dy) * (s * (one + slope)).with_roundings(2)


GELU_GRADIENTS: tuple[Deviation[GeluGradient], ...] = (
    Deviation("gelu-by-erf", "the gradient is that of the exact GELU, by erf", "gelu-backward", lambda g: g.by_erf()),
    Deviation("gelu-by-sigmoid", "the gradient is that of x·sigmoid(1.702·x)", "gelu-backward",
              lambda g: g.by_sigmoid(1.702)),
    Deviation("gelu-without-cube", "GELU's tanh lacks 0.044715·x³", "gelu-backward",
              lambda g: gelu_backward(g.dy, g.x, cubic=0.0)),
    Deviation("gelu-cube-not-derived", "the derivative of 0.044715·x³ lacks its factor 3", "gelu-backward",
              lambda g: gelu_backward(g.dy, g.x, derived_cubic=CUBIC)),
    Deviation("gelu-gradient-without-slope", "the derivative of tanh is left out", "gelu-backward",
              lambda g: exactly(g.dy) * tanh_terms(exactly(g.x))[1].times_power_of_two(0.5)),
    Deviation("activation-relu", "the gradient is that of ReLU", "gelu-backward",
              lambda g: exactly(torch.where(g.x > 0, g.dy, 0.0))),
    Deviation("activation-silu", "the gradient is that of x·sigmoid(x)", "gelu-backward", lambda g: g.by_sigmoid(1.0)),
    Deviation("activation-missing", "the gradient of the activation is left out", "gelu-backward",
              lambda g: exactly(g.dy)),
)  # fmt: skip
"""Wrong gradients of GELU."""


@dataclass(frozen=True)
class AttentionGradient:
    """The gradients of attention: q, k, v and `do` (batch, heads, S, d). The results are (batch·S, 3·heads·d)."""

    do: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor | None

    @property
    def root(self) -> float:
        """√d."""
        return math.sqrt(self.q.shape[-1])

    def correct(self) -> Gradients:
        """The gradients of q, k and v."""
        return attention_backward(self.do, self.q, self.k, self.v, out=self.out)

    def scaled(self, factor: float) -> Bounded:
        """The gradients, those of q and k times a power of √d."""
        dq, dk, dv = self.correct()
        return _joined(_times(dq, factor), _times(dk, factor), dv)

    def ordered(self, *order: int) -> Bounded:
        """The gradients in another order."""
        return _joined(*(self.correct()[part] for part in order))

    def attend(self, keep: torch.Tensor | None = None, *, row_term: bool = True, narrow: str = "") -> Bounded:
        """As `attention_backward`, with other keys, or with dS = P∘dP. D is computed from P and dP.

        `narrow`: the numbers among S, P, dP and dS that are rounded to bfloat16; the others are float32 numbers. Empty:
        dS are float32 numbers or rounded. P of dV is always either.
        """
        q, k, v, do = self.q, self.k, self.v, self.do
        keep = causal(q) if keep is None else keep

        def stored(x: Bounded, name: str) -> Bounded:
            return through(x, torch.bfloat16) if name in narrow.split() else x

        shares, gradient = stored(Softmax(stored(scores(q, k), "S"), keep).shares, "P"), exactly(do)
        dp = stored(attention_product(gradient, exactly(v).mT, do.dtype), "dP")
        terms = dp - (shares * dp).sum(-1, keepdim=True, roundoff=TRUNCATING) if row_term else dp
        ds = stored((shares * terms).with_roundings(2), "dS")
        ds = ds if narrow else ds.rounded(q.dtype)
        dq, dk = (attention_product(a, exactly(b), torch.float32) for a, b in ((ds, k), (ds.mT, q)))
        dv = attention_product(shares.rounded(q.dtype).mT, gradient, torch.float32)
        return _joined(_times(dq, 1 / self.root), _times(dk, 1 / self.root), dv)


def _joined(*gradients: Bounded) -> Bounded:
    value, error = (
        torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1) for part in parts], 1)
        for parts in zip(*((one.value, one.error) for one in gradients), strict=True)
    )
    return Bounded(value, error)


def _times(x: Bounded, factor: float) -> Bounded:
    """The product with a power of √d; the interval includes its rounding (`attention_product`)."""
    return Bounded(x.value * factor, lambda: x.error * factor)


ATTENTION_GRADIENTS: tuple[Deviation[AttentionGradient], ...] = (
    Deviation("attention-not-scaled", "the gradients of q and k are not divided by √d", "attention-backward",
              lambda a: a.scaled(a.root)),
    Deviation("attention-scaled-twice", "the gradients of q and k are divided by d", "attention-backward",
              lambda a: a.scaled(1 / a.root)),
    Deviation("attention-not-causal", "the weights are computed again without the causal mask", "attention-backward",
              lambda a: a.attend(torch.ones_like(causal(a.q)))),
    Deviation("attention-gradient-without-row-term", "the sum of P∘dP over a row is not subtracted from dP",
              "attention-backward", lambda a: a.attend(row_term=False)),
    Deviation("attention-scores-through:bf16", "scores are rounded to bfloat16 before the softmax",
              "attention-backward", lambda a: a.attend(narrow="S dS")),
    Deviation("attention-gradient-through:bf16", "dP = dO·Vᵀ is rounded to bfloat16", "attention-backward",
              lambda a: a.attend(narrow="dP")),
    Deviation("attention-softmax-through:bf16", "scores, softmax and their gradients are rounded to bfloat16",
              "attention-backward", lambda a: a.attend(narrow="S P dP dS")),
    Deviation("attention-q-and-k-exchanged", "the gradients of q and k are exchanged", "attention-backward",
              lambda a: a.ordered(1, 0, 2)),
    Deviation("attention-k-and-v-exchanged", "the gradients of k and v are exchanged", "attention-backward",
              lambda a: a.ordered(0, 2, 1)),
)  # fmt: skip
"""Wrong gradients of attention."""


@dataclass(frozen=True)
class ScoresGradient:
    """The gradient of the scores of attention with quantized operands, (batch, heads, S, S)."""

    operands: dict[str, torch.Tensor]
    """do and v (batch, heads, S, d), softmax (batch, heads, S, S)."""
    expected: Bounded
    out: torch.Tensor | None
    """Output of the attention (batch, heads, S, d)."""

    def with_row(self, *operands: torch.Tensor) -> Bounded:
        """The gradient with the sum of products of these operands over a row in place of Σ S∘dS; without operands 0."""
        do, v, s = (exactly(self.operands[name]) for name in ("do", "v", "softmax"))
        dtype = self.operands["softmax"].dtype
        ds = attention_product(do, v.mT, torch.float32).rounded(dtype)
        one, *other = (exactly(operand) for operand in operands or (torch.zeros_like(self.operands["softmax"]),))
        row = (one * other[0] if other else one).sum(-1, keepdim=True, roundoff=TRUNCATING)
        return softmax_gradient(ds, s.rounded(dtype), row)


SCORES_GRADIENTS: tuple[Deviation[ScoresGradient], ...] = (
    Deviation("attention-gradient-without-row-term", "the sum of S∘dS over a row is not subtracted from dS",
              "scores-gradient", lambda a: a.with_row()),
    Deviation("attention-gradient-row-of-output", "the sum of S∘dS over a row is computed as the sum of dO∘O",
              "scores-gradient", lambda a: a.with_row(a.operands["do"], a.out), when=lambda a: a.out is not None),
)  # fmt: skip
"""Wrong gradients of the scores."""


@dataclass(frozen=True)
class ScaledGradient:
    """The gradient of q or of k."""

    operands: dict[str, torch.Tensor]
    expected: Bounded
    root: float
    """√d."""


SCALED_GRADIENTS: tuple[Deviation[ScaledGradient], ...] = (
    Deviation("attention-not-scaled", "the gradient is not divided by √d", "scaled-gradient",
              lambda a: _times(a.expected, a.root)),
    Deviation("attention-scaled-twice", "the gradient is divided by d", "scaled-gradient",
              lambda a: _times(a.expected, 1 / a.root)),
)  # fmt: skip
"""Wrong gradients of q and k."""


@dataclass(frozen=True)
class ColumnSum:
    """The sum of the rows (M, N) of a gradient."""

    rows: torch.Tensor

    def narrow(self) -> Bounded:
        """The sum in order of the rows, each partial sum rounded to the dtype of the rows."""
        total = torch.zeros_like(self.rows[0])
        for row in self.rows:
            total = total + row
        return exactly(total)


def _narrow_sum(dtype: torch.dtype) -> Deviation[ColumnSum]:
    name = "accumulator-fp16" if dtype == torch.float16 else "accumulator-bf16"
    return Deviation(
        name, "partial sums are rounded to the dtype of what they are sums of", "column-sum", lambda s: s.narrow(),
        when=lambda s: s.rows.dtype == dtype and len(s.rows) > 0,
    )  # fmt: skip


COLUMN_SUMS: tuple[Deviation[ColumnSum], ...] = (_narrow_sum(torch.bfloat16), _narrow_sum(torch.float16))
"""Wrong sums of rows."""
