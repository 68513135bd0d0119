"""MoELayer: the rows of tokens go through the linear layers of their experts, and are added with the probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from narrowgauge.reference.experts.permute import permute
from narrowgauge.reference.high_precision.experts import (
    swiglu_backward,
    swiglu_forward,
    weight_gradient,
    weighted_rows,
    weighted_sum,
)
from narrowgauge.reference.modules.composed import Composed
from narrowgauge.reference.modules.grouped_linear import GroupedLinear
from narrowgauge.spec.modules.routing import check_choices, positions_of


class MoELayer(Composed):
    """y[t] = Σⱼ p[t, j]·fc2(swiglu(fc1(x[t]))) of the experts of token t, the first half of fc1's columns is the gate.

    Children `fc1` (hidden → 2·ffn) and `fc2` (ffn → hidden) are GroupedLinear with a weight for each expert, and seeds
    seed and seed + 1. SwiGLU and the sum over the choices are computed in float32 and cast once. Other options and
    errors: `GroupedLinear`. An observer gets the results of the children with the prefixes `fc1.` and `fc2.`,
    `source_rows`, `permuted`, `swiglu` and `y`, and the gradients `dfc2` and `dswiglu` of the outputs of fc2 and fc1,
    `dprobabilities` and `dx`.
    """

    def __init__(
        self, experts: int, hidden: int, ffn: int, bias: bool = True, *, seed: int = 0, **options: Any
    ) -> None:
        super().__init__()
        self.experts = experts
        self.fc1 = GroupedLinear(experts, hidden, 2 * ffn, bias, seed=seed, **options)
        self.fc2 = GroupedLinear(experts, ffn, hidden, bias, seed=seed + 1, **options)

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        """y (…, hidden) of x (…, hidden), whose rows are the T tokens.

        `expert_ids`: int32 or int64 (T, k), negative of no choice; `probabilities`: float32 (T, k). Raises TypeError or
        ValueError for ids and probabilities of another dtype, shape or device, and as the children.
        """
        check_choices(x, expert_ids, probabilities, self.experts)
        tokens = x.reshape(-1, x.shape[-1])
        _, source_rows, sizes = permute(tokens, expert_ids, experts=self.experts)
        source_rows = source_rows[: int(sizes.sum())]
        self.observe("source_rows", source_rows)
        positions = positions_of(source_rows, *expert_ids.shape)
        rows = _Permute.apply(tokens, source_rows, positions, self)  # type: ignore[no-untyped-call]
        inner = _Swiglu.apply(self.fc1(rows, sizes.tolist()), self)  # type: ignore[no-untyped-call]
        outer = self.fc2(inner, sizes.tolist())
        y: torch.Tensor = _Combine.apply(outer, probabilities, source_rows, positions, self)  # type: ignore[no-untyped-call]
        return y.view(x.shape)

    def backward_dw(self) -> None:
        """`Linear.backward_dw` of both layers, in the order of a backward pass."""
        for child in (self.fc2, self.fc1):
            child.backward_dw()


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, source_rows: torch.Tensor, positions: torch.Tensor, layer: MoELayer
    ) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(positions)
        rows = x[source_rows // max(1, positions.shape[1])]
        layer.observe("permuted", rows)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        dx = weighted_sum(rows, positions).value.to(rows.dtype)
        ctx.layer.observe("dx", dx)
        return dx, None, None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: MoELayer) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        y = swiglu_forward(x).value.to(x.dtype)
        layer.observe("swiglu", y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = swiglu_backward(dy, x).value.to(x.dtype)
        ctx.layer.observe("dswiglu", dx)
        return dx, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, probabilities: torch.Tensor, source_rows: torch.Tensor, positions: torch.Tensor,
        layer: MoELayer,
    ) -> torch.Tensor:  # fmt: skip
        ctx.layer = layer
        ctx.save_for_backward(y, probabilities, source_rows, positions)
        out = weighted_sum(y, positions, probabilities).value.to(y.dtype)
        layer.observe("y", out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, probabilities, source_rows, positions = ctx.saved_tensors
        layer: MoELayer = ctx.layer
        drows = dprobabilities = None
        if ctx.needs_input_grad[0]:
            drows = weighted_rows(dy, source_rows, probabilities).value.to(y.dtype)
            layer.observe("dfc2", drows)
        if ctx.needs_input_grad[1]:
            dprobabilities = weight_gradient(dy, y, positions).value.to(probabilities.dtype)
            layer.observe("dprobabilities", dprobabilities)
        return drows, dprobabilities, None, None, None
