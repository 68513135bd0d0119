"""Linear: y = x·wᵀ + bias and its gradients, by three products of operands quantized by role.

Follows the table of docs/numerics.md#modules: tensors are stored in high precision, and the operands of a product are
quantized just before the product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from narrowgauge.reference.gemm.gemm import gemm
from narrowgauge.reference.high_precision.additions import column_sum
from narrowgauge.reference.modules.amax_history import GRAD, INPUT, WEIGHT
from narrowgauge.reference.modules.quantized_layer import QuantizedLayer, column, plain_weight_product, weight_product
from narrowgauge.spec.modules.arguments import check_rotated_rows
from narrowgauge.spec.modules.autocast import current
from narrowgauge.spec.modules.training import TrainingRecipe
from narrowgauge.spec.quantized import Half, Quantized


class Linear(QuantizedLayer):
    """A linear layer that quantizes by the training recipe of the autocast, and not at all outside an autocast.

    `weight` (N, K) and `bias` (N,) have the dtype `dtype`: float32, bfloat16 or float16.
    seed: seed of stochastic rounding; the offsets in the n-th backward are 2n and 2n + 1.
    accumulate: the gradient of the weight is added to `weight.main_grad`, float32 (N, K), which is created if missing;
    `weight.grad` stays None.
    quantized_parameters: `weight` is None, and `write_weight` gives the layer codes and scales.
    delay_wgrad: the gradient of the weight is computed in `backward_dw`.
    amax_group: `torch.distributed` group over which the amax of every operand is reduced.

    Raises TypeError for another dtype, ValueError for invalid extents, an invalid seed or options that exclude each
    other.
    """

    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        seed: int = 0,
        accumulate: bool = False,
        quantized_parameters: bool = False,
        delay_wgrad: bool = False,
        amax_group: Any = None,
    ) -> None:
        super().__init__(
            ["weight"], in_features, out_features, bias, dtype, device, seed, accumulate, quantized_parameters,
            delay_wgrad, amax_group,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, K) to (…, N), in the dtype of the layer.

        Raises TypeError or ValueError if the layer or the recipe does not accept `x`, or if a quantized weight was
        written under another recipe.
        """
        recipe = current()
        self.check(x, recipe)
        return self.multiply(x, recipe)

    def write_weight(self, w: torch.Tensor, recipe: TrainingRecipe | str | None = None) -> None:
        """Quantizes `w` (N, K), float32, bfloat16 or float16, and stores the codes and scales of both halves, not `w`.

        `recipe`: by default the recipe of the autocast; forwards need the same recipe. Raises RuntimeError without a
        recipe, or if the layer has no quantized parameters; ValueError for another shape.
        """
        self.write_weights([w], recipe)

    def check(self, x: torch.Tensor, recipe: TrainingRecipe | None) -> None:
        """Raises the errors of `forward`, before any computation."""
        self.check_input(x, recipe)
        check_rotated_rows(x, self.in_features, recipe)
        self.check_weights(recipe)

    def multiply(self, x: torch.Tensor, recipe: TrainingRecipe | None) -> torch.Tensor:
        """The product alone, without the preceding steps of a subclass."""
        (weight,), (bias,) = self.parameters_of("weight"), self.parameters_of("bias")
        y: torch.Tensor = _Products.apply(x, weight, bias, self, recipe)  # type: ignore[no-untyped-call]
        return y

    def observe_input_gradient(self, dx: torch.Tensor) -> None:
        """Calls the observer with the gradient of the input of the product."""
        self.observe("dx", dx)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: Linear,
        recipe: TrainingRecipe | None,
    ) -> torch.Tensor:
        ctx.layer, ctx.recipe, scales = layer, recipe, None
        (halves,) = ctx.halves = layer.held_halves(recipe)
        rows = x.reshape(-1, layer.in_features)
        if recipe is None:
            y = torch.nn.functional.linear(rows, weight, bias)
        else:
            scales = layer.present_scales(recipe, x.device)
            a = layer.operand(rows, recipe.input, column(scales, INPUT))
            layer.observe("x", a)
            b = layer.weight_operand(weight, halves, recipe, scales)
            layer.observe("w", b)
            layer.record_forward(recipe, {INPUT: a.amax, WEIGHT: None if halves else b.amax})
            y = gemm(a, b, out_dtype=layer.dtype, bias=bias)
        ctx.save_for_backward(x, weight, scales)
        layer.observe("y", y)
        return y.view(*x.shape[:-1], layer.out_features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: Linear = ctx.layer
        recipe: TrainingRecipe | None = ctx.recipe
        x, weight, scales = ctx.saved_tensors
        rows, dy = x.reshape(-1, layer.in_features), dy.reshape(-1, layer.out_features)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        random = layer.next_random()
        # The scale of the gradient is updated at the end of every backward: the current scale, not the forward's scale.
        scale = None if recipe is None or not recipe.history else column(layer.scale, GRAD)

        def grad(recipe: TrainingRecipe, half: Half) -> Quantized:
            q = layer.operand(dy, recipe.grad, scale, half=half, random=random)
            layer.observe(half.operand("dy"), q)
            if recipe.history:
                layer.record(GRAD, q.required_amax)
            return q

        dx = dw = dbias = None
        if wants_x:
            if recipe is None:
                dx = dy @ weight
            else:
                a = grad(recipe, Half.ROW)
                b = layer.weight_operand(weight, ctx.halves[0], recipe, scales, half=Half.COLUMN)
                layer.observe("w columnwise", b)
                dx = gemm(a, b, out_dtype=layer.dtype)
            layer.observe_input_gradient(dx)
            dx = dx.view(x.shape)
        if wants_bias:
            dbias = column_sum(dy).value.to(layer.dtype)
            layer.observe("dbias", dbias)
        if wants_weight:
            if recipe is None:
                product = plain_weight_product(dy, rows)
            else:
                a = grad(recipe, Half.COLUMN)
                b = layer.operand(rows, recipe.input, column(scales, INPUT), half=Half.COLUMN)
                layer.observe("x columnwise", b)
                product = weight_product(a, b)
            (dw,) = layer.weight_gradients([product])
        if recipe is not None:
            layer.end_backward(recipe)
        return dx, dw, dbias, None, None
