"""Linear layer with quantized operands in its three GEMMs: forward, dgrad and wgrad."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.autograd.function import once_differentiable

from narrowgauge.native.modules.history import GRAD, INPUT
from narrowgauge.native.modules.layer import Layer, Options, Pass, report_halves
from narrowgauge.native.modules.products import column_sums, product
from narrowgauge.native.modules.saved_operands import load_operands, save_operands
from narrowgauge.spec.modules.arguments import check_rotated_rows
from narrowgauge.spec.modules.autocast import current
from narrowgauge.spec.modules.training import TrainingRecipe


class Linear(Layer):
    """y = x·weightᵀ + bias of x (…, in_features): y (…, out_features), in `dtype`.

    Under the recipe of an autocast, x, weight and dy are quantized once, both halves in one read. The GEMMs are y =
    x·w, dx = dy·w (columnwise) and dw = dy (columnwise)·x (columnwise). Only the columnwise half of x is saved for the
    backward pass. Without a recipe the GEMMs are torch's. The bias is added before the cast of y; the gradient of the
    bias is the float32 sum of the rows of dy, cast once. Options: see `Layer`. Source: docs/numerics.md#modules.

    An observer gets `x`, `x columnwise`, `w`, `w columnwise`, `dy` and `dy columnwise` (Quantized, if computed), `y`
    and `dx` (matrices), `dw` and `dbias`, and `history` and `scale` after every update.

    Raises TypeError or ValueError for wrong options, and in the forward pass for a wrong x or main_grad, and as
    `quantize` does.
    """

    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        amax_group: torch.distributed.ProcessGroup | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(("weight",), in_features, out_features, bias, amax_group=amax_group, **options)

    def write_weight(self, w: torch.Tensor, recipe: TrainingRecipe | str | None = None) -> None:
        """Quantizes `w` (N, K), float32, bfloat16 or float16, by `recipe` or the active autocast, and holds the result.

        The layer does not keep `w`. Raises RuntimeError if parameters are not quantized or no recipe is given or
        active, TypeError or ValueError for a wrong w.
        """
        self.write([w], recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y (…, N) of x (…, K)."""
        self.check_input(x)
        return self.multiply(x)

    def check_input(self, x: torch.Tensor) -> None:
        """Raises TypeError or ValueError if `x` is no input (…, K) of this layer under the active recipe."""
        super().check_input(x)
        recipe = current()
        check_rotated_rows(x, self.in_features, recipe)

    def multiply(self, x: torch.Tensor, dx: str = "dx") -> torch.Tensor:
        """y of a checked `x`. `dx`: name of the gradient of `x` for an observer."""
        (weight,), (bias,) = self.anchors(), self.biases()
        y: torch.Tensor = _Product.apply(self, self.begin(x, dx), x, weight, bias)  # type: ignore[no-untyped-call]
        return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: Linear, step: Pass, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        x_rows, x_columns = layer.operands(x.reshape(-1, layer.in_features), INPUT, step, columnwise=step.wgrad)
        assert x_rows is not None
        report_halves(layer, "x", x_rows, x_columns)
        w_rows, w_columns = layer.weight_operands("weight", step)
        report_halves(layer, "w", w_rows, w_columns)
        y = product(x_rows, w_rows, out_dtype=layer.dtype, bias=bias)
        layer.report("y", y)
        ctx.layer, ctx.step, ctx.shape = layer, step, x.shape
        save_operands(ctx, [x_columns, w_columns])
        return y.view(*x.shape[:-1], layer.out_features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: Linear = ctx.layer
        step: Pass = ctx.step
        x_columns, w_columns = load_operands(ctx)
        dy = dy.reshape(-1, layer.out_features)
        rows, columns = layer.operands(
            dy, GRAD, step, rowwise=step.dgrad, columnwise=step.wgrad, offset=layer.next_offset()
        )
        report_halves(layer, "dy", rows, columns)
        dx = dw = dbias = None
        if rows is not None:
            dx = product(rows, w_columns, out_dtype=layer.dtype)
            layer.report(step.dx, dx)
            dx = dx.view(ctx.shape)
        if columns is not None:
            (dw,) = layer.weight_gradients([columns], [x_columns])
        if ctx.needs_input_grad[4]:
            dbias = column_sums(dy)
            layer.report("dbias", dbias)
        if step.scale is not None and step.recipe is not None:
            layer.end_backward(step.recipe)
        return None, None, dx, dw, dbias
