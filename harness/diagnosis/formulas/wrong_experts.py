"""Wrong formulas of a mixture of experts: SwiGLU, and the sums over the choices of tokens, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.harness.diagnosis.formulas.wrong_forwards import sigmoid, through
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.reference.high_precision.bounded import Bounded, exactly
from narrowgauge.reference.high_precision.experts import (
    swiglu_backward,
    swiglu_forward,
    weight_gradient,
    weighted_rows,
    weighted_sum,
)
from narrowgauge.reference.high_precision.gelu import gelu_forward


@dataclass(frozen=True)
class Swiglu:
    """SwiGLU of x (M, 2·F), gate and up."""

    x: torch.Tensor

    @property
    def gate(self) -> torch.Tensor:
        return self.x.chunk(2, -1)[0]

    @property
    def up(self) -> torch.Tensor:
        return self.x.chunk(2, -1)[1]

    def of(self, gate: torch.Tensor, up: torch.Tensor) -> Bounded:
        """SwiGLU of another gate and up."""
        return swiglu_forward(torch.cat([gate, up], -1))

    def rounded(self) -> Bounded:
        """silu rounded to the dtype of x before the product."""
        silu = (exactly(self.gate) * sigmoid(self.gate)).with_roundings(1)
        return through(silu, self.x.dtype) * exactly(self.up)


SWIGLUS: tuple[Deviation[Swiglu], ...] = (
    Deviation("swiglu-halves-exchanged", "the last half of the columns is the gate", "swiglu",
              lambda g: g.of(g.up, g.gate)),
    Deviation("swiglu-halves-interleaved", "gate and up are the even and the odd columns", "swiglu",
              lambda g: g.of(g.x[:, ::2], g.x[:, 1::2])),
    Deviation("swiglu-rounded-early", "silu of the gate is rounded before the product with up", "swiglu",
              lambda g: g.rounded()),
    Deviation("activation-gelu", "the activation is GELU", "swiglu",
              lambda g: (gelu_forward(g.gate) * exactly(g.up)).with_roundings(1)),
    Deviation("activation-missing", "the activation is left out", "swiglu",
              lambda g: exactly(g.gate) * exactly(g.up)),
)  # fmt: skip
"""Wrong SwiGLU."""


@dataclass(frozen=True)
class SwigluGradient(Swiglu):
    """The gradient of SwiGLU at x (M, 2·F), from dy (M, F)."""

    dy: torch.Tensor

    def without_slope(self) -> Bounded:
        """dy·u·σ(g) for the gate: the derivative of σ is left out."""
        right = swiglu_backward(self.dy, self.x)
        s = (exactly(self.dy) * exactly(self.up) * sigmoid(self.gate)).with_roundings(2)
        width = self.dy.shape[-1]
        value = torch.cat([s.value, right.value[:, width:]], -1)
        return Bounded(value, lambda: torch.cat([s.error, right.error[:, width:]], -1))


def _exchanged(found: Bounded) -> Bounded:
    """The halves of the columns, exchanged."""
    value, error = (torch.cat(part.chunk(2, -1)[::-1], -1) for part in (found.value, found.error))
    return Bounded(value, error)


SWIGLU_GRADIENTS: tuple[Deviation[SwigluGradient], ...] = (
    Deviation("swiglu-halves-exchanged", "the last half of the columns is the gate", "swiglu-backward",
              lambda g: _exchanged(swiglu_backward(g.dy, torch.cat([g.up, g.gate], -1)))),
    Deviation("swiglu-gradients-exchanged", "the gradients of gate and up are exchanged", "swiglu-backward",
              lambda g: _exchanged(swiglu_backward(g.dy, g.x))),
    Deviation("swiglu-gradient-without-slope", "the gradient of the gate is dy·up·sigmoid(gate)", "swiglu-backward",
              lambda g: g.without_slope()),
)  # fmt: skip
"""Wrong gradients of SwiGLU."""


@dataclass(frozen=True)
class Choices:
    """Σ weights[t, j]·y[positions[t, j]] over the choices of each token."""

    y: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """Choices of a token."""
        return self.positions.shape[1]

    def of(self, positions: torch.Tensor | None = None, weights: torch.Tensor | None = None) -> Bounded:
        """The sum with other positions or weights."""
        return weighted_sum(
            self.y, self.positions if positions is None else positions, self.weights if weights is None else weights
        )

    def choice(self, number: int) -> Bounded:
        """One choice alone."""
        return self.of(self._only(number % self.width))

    def without(self, number: int) -> Bounded:
        """All choices but one."""
        number %= self.width
        return self.of(torch.where(self._is(number), -1, self.positions))

    def last(self) -> Bounded:
        """The last choice of each token that has a row."""
        numbers = torch.arange(self.width, device=self.positions.device)
        latest = torch.where(self.positions >= 0, numbers, -1).amax(1, keepdim=True)
        return self.of(torch.where(numbers == latest, self.positions, -1))

    def normalised(self) -> Bounded:
        """The sum with weights divided by their sum for each token."""
        found, total = self.of(), exactly(self.weights).sum(1, keepdim=True)  # type: ignore[arg-type]
        return (found / total).with_roundings(self.width)

    def narrow(self) -> Bounded:
        """Each product and each partial sum rounded to the dtype of y, in the order of the choices."""
        total: Bounded | None = None
        for number in range(self.width):
            term = through(self.of(self._only(number)), self.y.dtype)
            total = term if total is None else through(total + term, self.y.dtype)
        assert total is not None
        return total

    def _is(self, number: int) -> torch.Tensor:
        return torch.arange(self.width, device=self.positions.device) == number

    def _only(self, number: int) -> torch.Tensor:
        return torch.where(self._is(number), self.positions, -1)


def _has_several(choices: Choices) -> bool:
    return choices.width > 1


_CHOICES: tuple[Deviation[Choices], ...] = (
    Deviation("last-choice-left-out", "the last choice of every token is left out", "choices", lambda c: c.without(-1),
              when=_has_several),
    Deviation("first-choice-left-out", "the first choice of every token is left out", "choices", lambda c: c.without(0),
              when=_has_several),
    Deviation("first-choice-alone", "the first choice of every token is there alone", "choices", lambda c: c.choice(0),
              when=_has_several),
    Deviation("choices-overwritten", "the last choice of every token overwrites the others", "choices",
              lambda c: c.last(), when=_has_several),
    Deviation("choices-through-output", "products and partial sums are rounded to the dtype of the output", "choices",
              lambda c: c.narrow(), when=_has_several),
)  # fmt: skip
CHOICES: tuple[Deviation[Choices], ...] = (
    *_CHOICES,
    Deviation("probabilities-missing", "the probabilities are left out", "choices",
              lambda c: weighted_sum(c.y, c.positions), when=lambda c: c.weights is not None),
    Deviation("probabilities-twice", "the probabilities are applied twice", "choices",
              lambda c: c.of(weights=c.weights.square()), when=lambda c: c.weights is not None),
    Deviation("probabilities-of-other-choice", "a choice has the probability of the choice before it", "choices",
              lambda c: c.of(weights=c.weights.roll(1, 1)), when=lambda c: c.weights is not None and c.width > 1),
    Deviation("probabilities-normalised", "the probabilities are divided by their sum for each token", "choices",
              lambda c: c.normalised(), when=lambda c: c.weights is not None),
)  # fmt: skip
"""Wrong sums over choices."""


@dataclass(frozen=True)
class ChoiceRows:
    """weights[t, j]·dy[t] in the row of choice j of token t."""

    dy: torch.Tensor
    source_rows: torch.Tensor
    weights: torch.Tensor

    def of(self, weights: torch.Tensor) -> Bounded:
        """The rows with other weights."""
        return weighted_rows(self.dy, self.source_rows, weights)


CHOICE_ROWS: tuple[Deviation[ChoiceRows], ...] = (
    Deviation("probabilities-missing", "the probabilities are left out", "choice-rows",
              lambda c: c.of(torch.ones_like(c.weights))),
    Deviation("probabilities-twice", "the probabilities are applied twice", "choice-rows",
              lambda c: c.of(c.weights.square())),
    Deviation("probabilities-of-other-choice", "a choice has the probability of the choice before it", "choice-rows",
              lambda c: c.of(c.weights.roll(1, 1)), when=lambda c: c.weights.shape[1] > 1),
)  # fmt: skip
"""Wrong gradients of the rows of choices."""


@dataclass(frozen=True)
class WeightGradient:
    """Σₙ dy[t, n]·y[positions[t, j], n]."""

    dy: torch.Tensor
    y: torch.Tensor
    positions: torch.Tensor

    def narrow(self) -> Bounded:
        """Products rounded to the dtype of y."""
        rows = self.positions.clamp(min=0)
        products = through(exactly(self.dy.unsqueeze(1)) * exactly(self.y[rows]), self.y.dtype)
        return products.masked((self.positions >= 0).unsqueeze(-1)).sum(-1)


WEIGHT_GRADIENTS: tuple[Deviation[WeightGradient], ...] = (
    Deviation("products-through-output", "products are rounded to the dtype of y before the sum", "weight-gradient",
              lambda w: w.narrow(), when=lambda w: len(w.y) > 0),
    Deviation("gradient-of-other-choice", "a choice has the gradient of the choice before it", "weight-gradient",
              lambda w: weight_gradient(w.dy, w.y, w.positions.roll(1, 1)), when=lambda w: w.positions.shape[1] > 1),
)  # fmt: skip
"""Wrong gradients of probabilities."""
