"""Mixture of experts: the linear layers of the experts of each token, SwiGLU between, and the sum over the choices."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from narrowgauge.native.experts.rows import combine, permute
from narrowgauge.native.modules.composed import Composed
from narrowgauge.native.modules.grouped_linear import GroupedLinear
from narrowgauge.native.modules.layer import Options
from narrowgauge.spec.modules.routing import check_choices, positions_of


class MoELayer(Composed):
    """y[t] = Σⱼ p[t, j]·fc2(swiglu(fc1(x[t]))) of the experts of token t, the first half of fc1's columns is the gate.

    `fc1` (hidden → 2·ffn) and `fc2` (ffn → hidden) are GroupedLinear with a weight for each expert, and seeds seed and
    seed + 1. SwiGLU and the sum over the choices are computed in float32 and cast once. A forward pass waits for the
    numbers of rows of the experts. Options and errors: see GroupedLinear.

    An observer gets the results of the children with the prefix `fc1.` or `fc2.`, `source_rows`, `permuted`, `swiglu`
    and `y`, and the gradients `dfc2` and `dswiglu` of the outputs of fc2 and fc1, `dprobabilities` and `dx`.
    """

    def __init__(self, experts: int, hidden: int, ffn: int, bias: bool = True, **options: Unpack[Options]) -> None:
        super().__init__()
        self.experts = experts
        first, second = (Options(**{**options, "seed": options.get("seed", 0) + n}) for n in range(2))
        self.fc1 = GroupedLinear(experts, hidden, 2 * ffn, bias, **first)
        self.fc2 = GroupedLinear(experts, ffn, hidden, bias, **second)

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        """y (…, hidden) of x (…, hidden), whose rows are the T tokens.

        `expert_ids`: int32 or int64 (T, k), negative of no choice; `probabilities`: float32 (T, k).
        """
        check_choices(x, expert_ids, probabilities, self.experts)
        tokens = x.reshape(-1, x.shape[-1])
        rows, source_rows, sizes = permute(tokens.detach(), expert_ids, experts=self.experts)
        splits: list[int] = sizes.tolist()
        rows, source_rows = rows[: sum(splits)], source_rows[: sum(splits)]
        positions = positions_of(source_rows, *expert_ids.shape)
        self.report("source_rows", source_rows)
        self.report("permuted", rows)
        rows = _Rows.apply(tokens, rows, positions, self)  # type: ignore[no-untyped-call]
        hidden = self.watched(self.fc1(rows, splits), "dswiglu")
        gate, up = hidden.chunk(2, -1)
        inner = (functional.silu(gate.float()) * up.float()).to(hidden.dtype)
        self.report("swiglu", inner)
        y: torch.Tensor = _Combine.apply(self.fc2(inner, splits), probabilities, source_rows, positions, self)  # type: ignore[no-untyped-call]
        return y.view(x.shape)

    def backward_dw(self) -> None:
        """`Linear.backward_dw` of both layers, in the order of their backward passes."""
        for layer in (self.fc2, self.fc1):
            layer.backward_dw()


class _Rows(torch.autograd.Function):
    """Rows of the choices, whose gradients are added for each token."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, layer: MoELayer
    ) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(positions)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        dx = combine(rows, positions, torch.ones(positions.shape, device=positions.device))
        ctx.layer.report("dx", dx)
        return dx, None, None, None


class _Combine(torch.autograd.Function):
    """Rows of the choices, added for each token with the probabilities."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, probabilities: torch.Tensor, source_rows: torch.Tensor, positions: torch.Tensor,
        layer: MoELayer,
    ) -> torch.Tensor:  # fmt: skip
        ctx.layer = layer
        ctx.save_for_backward(y, probabilities, source_rows, positions)
        out = combine(y, positions, probabilities)
        layer.report("y", out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, probabilities, source_rows, positions = ctx.saved_tensors
        layer: MoELayer = ctx.layer
        of_rows = dy[source_rows // max(1, positions.shape[1])].float()
        rows = of_probabilities = None
        if ctx.needs_input_grad[0]:
            rows = (of_rows * probabilities.flatten()[source_rows].unsqueeze(1)).to(y.dtype)
            layer.report("dfc2", rows)
        if ctx.needs_input_grad[1]:
            of_probabilities = torch.zeros_like(probabilities).flatten()
            of_probabilities[source_rows] = (of_rows * y.float()).sum(1)
            of_probabilities = of_probabilities.view_as(probabilities)
            layer.report("dprobabilities", of_probabilities)
        return rows, of_probabilities, None, None, None
