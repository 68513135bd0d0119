"""A transformer layer: its four linear layers, and the steps in high precision between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.operations.modules.delayed import States
from narrowgauge.harness.operations.modules.ground import Ground
from narrowgauge.harness.operations.modules.linear import LinearStages
from narrowgauge.harness.operations.modules.norm import NormStages
from narrowgauge.harness.operations.modules.quantized_attention import QuantizedAttentionStages
from narrowgauge.harness.operations.stages.oracle import (
    attention_backward,
    attention_forward,
    gelu_backward,
    gelu_forward,
    residual_sum,
)
from narrowgauge.reference.high_precision.bounded import Bounded

Matrix = torch.Tensor | None
_OPERANDS = {
    "gelu": ("x",), "gelu-backward": ("dy", "x"), "residual": ("a", "b"), "attention": ("qkv",),
    "attention-backward": ("dy", "qkv"),
}  # fmt: skip
"""Names of the operands of a formula, by its name in `harness.diagnosis.formulas.explain_formula`."""


def _by_name(formula: Callable[..., Bounded], **operands: torch.Tensor) -> Bounded:
    """The result of a formula of its operands, which stand in order."""
    return formula(*operands.values())


class TransformerStages:
    """The stages of a transformer layer in one step: forward, backward and end.

    h = x + proj(attention(qkv(x))); y = h + fc2(gelu(fc1(h))). A stage is judged given the module's own results of the
    stages before, as in `LinearStages`.
    """

    def __init__(self, ground: Ground, states: States) -> None:
        """`states`: present states of delayed scaling, changed at the end of every forward and backward."""
        self.ground = ground
        qkv, proj, fc1, fc2 = ground.plan.layers
        self.qkv, self.fc1 = (NormStages(ground, layer, states) for layer in (qkv, fc1))
        self.proj, self.fc2 = (LinearStages(ground, layer, states) for layer in (proj, fc2))
        self.batch, self.sequence, self.hidden = ground.step.x.shape
        self._saved: dict[str, Matrix] = {}
        self._quantized = (
            QuantizedAttentionStages(ground, ground.plan.heads, states)
            if ground.plan.training.quantizes_attention
            else None
        )

    def forward(self, x: Matrix) -> Matrix:
        """Judge the forward of `x` (B·S, hidden); gives y."""
        qkv = self.qkv.forward(x)
        attended = (
            self._between("attention", self._attention, qkv, wrong="attention")
            if self._quantized is None
            else self._quantized.forward(qkv)
        )
        h = self._between("h", residual_sum, x, self.proj.forward(attended), wrong="residual", others={})
        inner = self.fc1.forward(h)
        activated = self._between("gelu", gelu_forward, inner, width=self.ground.plan.layers[2].outer, wrong="gelu")
        self._saved = {"qkv": qkv, "attention": attended, "h": h, "fc1": inner}
        others = {} if x is None else {"the layer's input": x}
        return self._between("y", residual_sum, h, self.fc2.forward(activated), wrong="residual", others=others)

    def backward(self, dy: Matrix) -> Matrix:
        """Judge the backward of `dy` (B·S, hidden); gives dx."""
        ffn = self.ground.plan.layers[2].outer
        dgelu = self._between(
            "dgelu", gelu_backward, self.fc2.backward(dy), self._saved["fc1"], width=ffn, wrong="gelu-backward"
        )
        dh = self._between("dh", residual_sum, dy, self.fc1.backward(dgelu), wrong="residual", others={})
        dattention = self.proj.backward(dh)
        dqkv = (
            self._between(
                "dqkv", self._attention_backward, dattention, self._saved["qkv"], width=3 * self.hidden,
                wrong="attention-backward",
            )
            if self._quantized is None
            else self._quantized.backward(dattention)
        )  # fmt: skip
        inner = self.qkv.backward(dqkv)
        return (
            None
            if self.ground.plan.use == "frozen-input"
            else self._between("dx", residual_sum, dh, inner, wrong="residual", others={})
        )

    def end_forward(self, *, recorded: bool = False) -> None:
        """`LinearStages.end_forward` of every layer."""
        for layer in self._layers:
            layer.end_forward(recorded=recorded)

    def share_forward(self, last: Any) -> None:
        """`LinearStages.share_forward` of every layer. `last`: stages of the same kind."""
        for layer, other in zip(self._layers, last._layers, strict=True):
            layer.share_forward(other)

    @property
    def _layers(self) -> list[Any]:
        attention = [] if self._quantized is None else [self._quantized]
        return [self.qkv, *attention, self.proj, self.fc1, self.fc2]

    def end(self) -> None:
        """Judge the end of the step of every layer."""
        for layer in self._layers:
            layer.end()

    def _between(
        self,
        name: str,
        formula: Callable[..., Bounded],
        *given: Matrix,
        wrong: str,
        width: int = 0,
        **more: Any,
    ) -> Matrix:
        """Judge what stays in high precision: a formula of the reports, if all operands were reported.

        `wrong`: which wrong formulas to look for, where it is wrong, which take `more` than it does.
        """
        shape = (self.batch * self.sequence, width or self.hidden)
        operands = dict(zip(_OPERANDS[wrong], given, strict=True))
        names: dict[str, Any] = {}
        if all(one is not None for one in given):
            names = dict(operands)
            if wrong == "attention":
                names = dict(zip("qkv", self._heads(given[0]), strict=True))  # type: ignore[arg-type]
            if wrong == "attention-backward":
                names = dict(zip("qkv", self._heads(given[1]), strict=True))  # type: ignore[arg-type]
                do, out = (self._of_heads(matrix) for matrix in (given[0], self._saved["attention"]))
                names |= {"do": do, "out": out}
        return self.ground.high_precision(
            name, shape, partial(_by_name, formula), operands, wrong, **names, **more
        )  # fmt: skip

    def _attention(self, qkv: torch.Tensor) -> Bounded:
        return self._joined(attention_forward(*self._heads(qkv)))

    def _heads(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        """q, k and v (B, heads, S, d) of (B·S, 3·hidden)."""
        heads = self.ground.plan.heads
        parts = qkv.view(self.batch, self.sequence, 3, heads, -1).permute(2, 0, 3, 1, 4)
        return list(parts.unbind(0))

    def _of_heads(self, matrix: Matrix) -> Matrix:
        """(B·S, heads·d) as (B, heads, S, d)."""
        shape = (self.batch, self.sequence, self.ground.plan.heads, -1)
        return None if matrix is None else matrix.view(shape).transpose(1, 2)

    def _joined(self, heads: Bounded) -> Bounded:
        """(B, heads, S, d) as (B·S, heads·d)."""
        value, error = (
            part.transpose(1, 2).reshape(self.batch * self.sequence, -1) for part in (heads.value, heads.error)
        )
        return Bounded(value, error, heads.assumes)

    def _attention_backward(self, gradient: torch.Tensor, qkv: torch.Tensor) -> Bounded:
        do, out = (self._of_heads(matrix) for matrix in (gradient, self._saved["attention"]))
        assert do is not None
        found = [self._joined(one) for one in attention_backward(do, *self._heads(qkv), out=out)]
        value, error = (torch.cat(parts, 1) for parts in zip(*((one.value, one.error) for one in found), strict=True))
        return Bounded(value, error, found[0].assumes)
