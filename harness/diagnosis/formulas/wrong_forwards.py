"""Wrong formulas of forward passes: norms, activations, attention and residuals.

Each gives the interval of the results of a float32 kernel with this mistake, derived as that of the correct formula
(`reference.high_precision`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.reference.high_precision.additions import residual_sum
from narrowgauge.reference.high_precision.attention import Softmax, attention_product, causal, scores, weighted_mean
from narrowgauge.reference.high_precision.bounded import EXP_ULPS, Bounded, exactly, relative_error, rounded_constant
from narrowgauge.reference.high_precision.gelu import gelu_forward
from narrowgauge.reference.high_precision.norm import Kind, norm_forward, normalised
from narrowgauge.spec.summation import SMALLEST_NORMAL, UNIT


@dataclass(frozen=True)
class Norm:
    """A norm of x (M, K)."""

    x: torch.Tensor
    gamma: torch.Tensor
    added: torch.Tensor | None
    """beta, (K,)."""
    kind: Kind
    eps: float

    @property
    def other(self) -> Kind:
        """The other kind of norm."""
        return "rms" if self.kind == "layer" else "layer"

    def of(self, gamma: torch.Tensor, added: torch.Tensor | None) -> Bounded:
        """The norm with another gamma or beta."""
        return norm_forward(self.x, gamma, added, self.kind, self.eps)

    def result(self, unit: Bounded, store: torch.dtype = torch.float32) -> Bounded:
        """The normalised x times gamma plus beta, as in `norm_forward`. `store`: dtype of results between steps."""
        y = (
            (through(unit, store) * exactly(self.gamma)).with_roundings(1)
            if store == torch.float32
            else through(through(unit, store) * exactly(self.gamma), store)
        )
        return y if self.added is None else y + exactly(self.added)

    def eps_outside_root(self) -> Bounded:
        """The normalised x, with eps added behind the root of the variance."""
        _, r, mean = normalised(self.x, self.kind, 0.0)
        root = _inverse(_inverse(r) + rounded_constant(self.eps, self.x.device))
        return (exactly(self.x) if mean is None else exactly(self.x) - mean) * root

    def unbiased(self) -> Bounded:
        """The normalised x with the sum of squares divided by K − 1.

        1/√(S/(K − 1) + eps) is 1/√(S/K + eps·(K − 1)/K) times √((K − 1)/K), with the same number of roundings.
        """
        rest = (self.x.shape[1] - 1) / self.x.shape[1]
        unit = normalised(self.x, self.kind, self.eps * rest)[0]
        return Bounded(unit.value * math.sqrt(rest), lambda: unit.error * math.sqrt(rest)).with_roundings(1)


def _inverse(x: Bounded) -> Bounded:
    return exactly(torch.ones((), device=x.value.device)) / x


NORMS: tuple[Deviation[Norm], ...] = (
    Deviation("norm-without-eps", "eps is left out", "norm", lambda n: n.result(normalised(n.x, n.kind, 0.0)[0])),
    Deviation("norm-eps-outside-root", "eps is added behind the root", "norm",
              lambda n: n.result(n.eps_outside_root())),
    Deviation("norm-unbiased", "the variance is divided by K − 1", "norm", lambda n: n.result(n.unbiased()),
              when=lambda n: n.x.shape[1] > 1),
    Deviation("norm-of-other-kind", "it is the norm of the other kind", "norm",
              lambda n: n.result(normalised(n.x, n.other, n.eps)[0])),
    Deviation("norm-without-gamma", "gamma is left out", "norm", lambda n: n.of(torch.ones_like(n.gamma), n.added)),
    Deviation("norm-gamma-plus-one", "gamma is 1 + gamma", "norm", lambda n: n.of(n.gamma.float() + 1, n.added)),
    Deviation("norm-without-beta", "beta is left out", "norm", lambda n: n.of(n.gamma, torch.zeros_like(n.added)),
              when=lambda n: n.added is not None),
    Deviation("norm-rounded-early", "the normalised x is rounded before gamma and beta", "norm",
              lambda n: n.result(normalised(n.x, n.kind, n.eps)[0], n.x.dtype)),
)  # fmt: skip
"""Wrong norms."""


@dataclass(frozen=True)
class Gelu:
    """GELU of x."""

    x: torch.Tensor


GELUS: tuple[Deviation[Gelu], ...] = (
    Deviation("gelu-by-erf", "GELU is the exact GELU, by erf", "gelu",
              lambda g: exactly(g.x) * normal_distribution(g.x)),
    Deviation("gelu-by-sigmoid", "GELU is x·sigmoid(1.702·x)", "gelu", lambda g: exactly(g.x) * sigmoid(g.x, 1.702)),
    Deviation("gelu-without-cube", "GELU's tanh lacks 0.044715·x³", "gelu", lambda g: gelu_forward(g.x, cubic=0.0)),
    Deviation("activation-relu", "the activation is ReLU", "gelu", lambda g: exactly(g.x.clamp(min=0))),
    Deviation("activation-silu", "the activation is x·sigmoid(x)", "gelu", lambda g: exactly(g.x) * sigmoid(g.x)),
    Deviation("activation-missing", "the activation is left out", "gelu", lambda g: exactly(g.x)),
)  # fmt: skip
"""Other activations."""


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


@dataclass(frozen=True)
class Attention:
    """Causal attention of q, k and v (batch, heads, S, d). Its outputs are (batch·S, heads·d)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.q.shape[1]

    @property
    def size(self) -> int:
        """Elements of a head, d."""
        return self.q.shape[-1]

    def attend(
        self,
        *,
        factor: float | None = None,
        keep: torch.Tensor | None = None,
        given: tuple[torch.Tensor, ...] | None = None,
        store: Callable[[Bounded], Bounded] = lambda x: x,
        stored_dtype: torch.dtype | None = None,
    ) -> Bounded:
        """Outputs with another factor of the scores, mask or operands; `store`: rounding of the scores."""
        q, k, v = (self.q, self.k, self.v) if given is None else given
        softmax = Softmax(
            store(scores(q, k, 1 / math.sqrt(self.size) if factor is None else factor)),
            causal(self.q) if keep is None else keep,
        )
        return _joined(weighted_mean(softmax, v, self.q.dtype if stored_dtype is None else stored_dtype))

    def without_own_key(self, first_row: float) -> Bounded:
        """Outputs of queries that do not see their own key. `first_row`: output of the query without any key."""
        keep = causal(self.q, future=-1)
        keep[..., 0, 0] = True
        out = self.attend(keep=keep)
        first = (torch.arange(len(out.value), device=self.q.device) % self.q.shape[2] == 0).unsqueeze(1)
        return Bounded(out.value.masked_fill(first, first_row), out.error.masked_fill(first, 0.0))

    def of_layout(self, shape: tuple[str, ...], order: tuple[int, ...]) -> Bounded:
        """Outputs for q, k and v as they lie in the output of the layer before, (batch, S, 3·heads·d), taken in another
        order. `shape`: order of the dimensions 3, heads and d."""
        together = torch.stack([self.q, self.k, self.v]).permute(1, 3, 0, 2, 4)
        extents = {"3": 3, "heads": self.heads, "d": self.size}
        taken = together.reshape(*together.shape[:2], *(extents[name] for name in shape)).permute(*order)
        return self.attend(given=tuple(taken))

    def heads_not_joined(self) -> Bounded:
        """Outputs whose heads are not joined row by row."""
        out = weighted_mean(Softmax(scores(self.q, self.k), causal(self.q)), self.v, self.q.dtype)
        width = self.heads * self.size
        return Bounded(out.value.reshape(-1, width), out.error.reshape(-1, width))

    def softmax_in_bfloat16(self) -> Bounded:
        """Outputs with scores and softmax rounded to bfloat16."""
        rounded = through(scores(self.q, self.k), torch.bfloat16)
        shares = through(Softmax(rounded, causal(self.q)).shares, torch.bfloat16)
        return _joined(attention_product(shares, exactly(self.v), torch.float32))


def _joined(out: Bounded) -> Bounded:
    value, error = (part.transpose(1, 2).flatten(2).flatten(0, 1) for part in (out.value, out.error))
    return Bounded(value, error)


ATTENTIONS: tuple[Deviation[Attention], ...] = (
    Deviation("attention-not-scaled", "scores are not divided by √d", "attention", lambda a: a.attend(factor=1.0)),
    Deviation("attention-scaled-twice", "scores are divided by d", "attention", lambda a: a.attend(factor=1 / a.size)),
    Deviation("attention-not-causal", "queries see the keys behind them", "attention",
              lambda a: a.attend(keep=torch.ones_like(causal(a.q)))),
    Deviation("attention-mask-one-late", "queries see one key behind their own", "attention",
              lambda a: a.attend(keep=causal(a.q, future=1))),
    Deviation("attention-mask-one-early", "queries do not see their own key", "attention",
              lambda first_row, a: a.without_own_key(first_row), {"NaN": torch.nan, "0": 0.0}),
    Deviation("attention-heads-interleaved", "q, k and v are taken head by head, not after one another", "attention",
              lambda a: a.of_layout(("heads", "3", "d"), (3, 0, 2, 1, 4)), when=lambda a: a.heads > 1),
    Deviation("attention-heads-last", "heads are taken as the last dimension of q, k and v, not before the head size",
              "attention", lambda a: a.of_layout(("3", "d", "heads"), (2, 0, 4, 1, 3)), when=lambda a: a.heads > 1),
    Deviation("attention-q-and-k-exchanged", "q and k are exchanged", "attention",
              lambda a: a.attend(given=(a.k, a.q, a.v))),
    Deviation("attention-k-and-v-exchanged", "k and v are exchanged", "attention",
              lambda a: a.attend(given=(a.q, a.v, a.k))),
    Deviation("attention-output-not-transposed", "the heads of the output are not joined row by row", "attention",
              lambda a: a.heads_not_joined(), when=lambda a: a.heads > 1 and a.q.shape[2] > 1),
    Deviation("attention-scores-through:bf16", "scores are rounded to bfloat16 before the softmax", "attention",
              lambda a: a.attend(store=lambda x: through(x, torch.bfloat16), stored_dtype=torch.float32)),
    Deviation("attention-softmax-through:bf16", "scores and softmax are rounded to bfloat16", "attention",
              lambda a: a.softmax_in_bfloat16()),
)  # fmt: skip
"""Wrong attention."""
ROW_SUM: Deviation[Attention] = Deviation(
    "attention-row-sum",
    "each query and head has its expected output times one number: the sum of the weights is wrong",
    "attention", exact=False,
)  # fmt: skip


@dataclass(frozen=True)
class SoftmaxStep(Attention):
    """The softmax of the scores of q and k, (batch, heads, S, S); v has no part in it."""

    @classmethod
    def of(cls, operands: dict[str, torch.Tensor], expected: Bounded) -> SoftmaxStep:
        """The step with these `operands`, q and k."""
        return cls(operands["q"], operands["k"], operands["k"])

    def attend(
        self,
        *,
        factor: float | None = None,
        keep: torch.Tensor | None = None,
        given: tuple[torch.Tensor, ...] | None = None,
        store: Callable[[Bounded], Bounded] = lambda x: x,
        stored_dtype: torch.dtype | None = None,
    ) -> Bounded:
        q, k, *_ = (self.q, self.k) if given is None else given
        return Softmax(store(scores(q, k, factor)), causal(q) if keep is None else keep).shares


SOFTMAXES: tuple[Deviation[Any], ...] = tuple(
    replace(row, step="softmax", stages=frozenset(("softmax",)))
    for row in ATTENTIONS
    if row.cause
    in (
        "attention-not-scaled", "attention-scaled-twice", "attention-not-causal", "attention-mask-one-late",
        "attention-q-and-k-exchanged", "attention-scores-through:bf16",
    )
)  # fmt: skip
"""Wrong softmaxes."""


@dataclass(frozen=True)
class Residual:
    """The sum a + b."""

    a: torch.Tensor
    b: torch.Tensor
    others: dict[str, torch.Tensor]
    """Further tensors of the layer, by name."""


RESIDUALS: tuple[Deviation[Residual], ...] = (
    Deviation("residual-of-other", "{} is added in place of the residual", "residual",
              lambda tensor, r: residual_sum(tensor, r.b), lambda r: r.others),
    Deviation("residual-missing", "the residual is not added", "residual", lambda r: exactly(r.b)),
    Deviation("residual-alone", "the residual is there alone", "residual", lambda r: exactly(r.a)),
)  # fmt: skip
"""Wrong sums."""
