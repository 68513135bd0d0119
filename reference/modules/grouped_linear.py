"""GroupedLinear: each section of rows has its own linear layer, as in a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from narrowgauge.reference.gemm.gemm import gemm_grouped
from narrowgauge.reference.high_precision.additions import column_sum
from narrowgauge.reference.modules.amax_history import GRAD, INPUT, WEIGHT
from narrowgauge.reference.modules.quantized_layer import QuantizedLayer, column, plain_weight_product, weight_product
from narrowgauge.reference.quantize.quantize import quantize_grouped
from narrowgauge.reference.quantize.sections import pad_sections, unpad_sections
from narrowgauge.spec.modules.arguments import check_groups, check_splits
from narrowgauge.spec.modules.autocast import current
from narrowgauge.spec.modules.training import TrainingRecipe
from narrowgauge.spec.quantized import GroupedQuantized, Half
from narrowgauge.spec.recipes import Recipe


class GroupedLinear(QuantizedLayer):
    """A linear layer per group: parameters `weight0`, `bias0` and so on, with a main gradient per weight.

    Every section is padded with rows of zeros to the alignment of the input recipe and quantized separately; the output
    is unpadded. Under delayed scaling all groups share the three scales, and the largest amax of the groups is
    recorded. Other options and errors: `Linear`.
    """

    def __init__(
        self,
        groups: int,
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
    ) -> None:
        check_groups(groups)
        self.groups = groups
        super().__init__(
            [f"weight{group}" for group in range(groups)], in_features, out_features, bias, dtype, device, seed,
            accumulate, quantized_parameters, delay_wgrad,
        )  # fmt: skip

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        """x (…, K) to (…, N): the first m_splits[0] rows go through group 0, the next m_splits[1] through group 1 …

        All dimensions but the last are rows. Raises ValueError if the splits do not add up to the rows, and the errors
        of `Linear`.
        """
        recipe = current()
        self.check_input(x, recipe)
        check_splits(m_splits, self.groups, x, self.in_features)
        self.check_weights(recipe)
        parameters = [*self.parameters_of("weight"), *self.parameters_of("bias")]
        y: torch.Tensor = _Products.apply(x, self, recipe, list(m_splits), *parameters)  # type: ignore[no-untyped-call]
        return y

    def write_weight(self, w: Sequence[torch.Tensor], recipe: TrainingRecipe | str | None = None) -> None:
        """`Linear.write_weight` for the weights of all groups: G tensors (N, K), or a tensor (G, N, K)."""
        self.write_weights(list(w), recipe)

    def observe_each(self, name: str, values: Sequence[Any]) -> None:
        """Calls the observer with a list of values, one per group."""
        self.observe(name, list(values))

    def sections(
        self,
        x: torch.Tensor,
        sizes: torch.Tensor,
        recipe: Recipe,
        scale: torch.Tensor | None,
        *,
        half: Half = Half.ROW,
        random: tuple[int, int] | None = None,
    ) -> GroupedQuantized:
        """A half of `x` (M, K), already padded, quantized in sections. `random`: seed and offset of both halves."""
        half_random = None
        if random is not None and recipe.rounding == "stochastic":
            half_random = half.pick((random, (random[0], random[1] + 1)))
        scales = None if scale is None else scale.repeat(self.groups)
        columnwise = half is Half.COLUMN
        return quantize_grouped(x, sizes, half.recipe(recipe), columnwise=columnwise, scale=scales, random=half_random)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        layer: GroupedLinear,
        recipe: TrainingRecipe | None,
        splits: list[int],
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        weights = [weight for weight in parameters[: layer.groups] if weight is not None]
        biases = parameters[layer.groups :]
        ctx.layer, ctx.recipe, ctx.splits, scales = layer, recipe, splits, None
        ctx.halves = layer.held_halves(recipe)
        rows = x.reshape(-1, layer.in_features)
        if recipe is None:
            parts = zip(torch.split(rows, splits), weights, biases, strict=True)
            y = torch.cat([torch.nn.functional.linear(*part) for part in parts])
        else:
            scales = layer.present_scales(recipe, x.device)
            sizes = torch.tensor(splits, device=x.device)
            padded, aligned = pad_sections(rows, sizes, recipe.input)
            a = layer.sections(padded, aligned, recipe.input, column(scales, INPUT))
            layer.observe("x", a.sections())
            pairs = zip(weights, ctx.halves, strict=True)
            b = [layer.weight_operand(weight, halves, recipe, scales) for weight, halves in pairs]
            layer.observe("w", b)
            if recipe.history:
                amaxes = None if layer.quantized_parameters else torch.cat([q.amax for q in b if q.amax is not None])
                layer.record_forward(recipe, {INPUT: a.amax, WEIGHT: amaxes})
            present = [bias for bias in biases if bias is not None]
            bias = torch.stack(present) if present else None
            y = unpad_sections(gemm_grouped(a, b, out_dtype=layer.dtype, bias=bias), sizes, recipe.input)
        ctx.save_for_backward(x, scales, *weights)
        layer.observe("y", y)
        return y.view(*x.shape[:-1], layer.out_features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: GroupedLinear = ctx.layer
        recipe: TrainingRecipe | None = ctx.recipe
        x, scales, *weights = ctx.saved_tensors
        rows, dy = x.reshape(-1, layer.in_features), dy.reshape(-1, layer.out_features)
        wants_x, wants = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        wants_weight, wants_bias = wants[: layer.groups], wants[layer.groups :]
        random = layer.next_random()
        scale = None if recipe is None or not recipe.history else column(layer.scale, GRAD)
        sizes = torch.tensor(ctx.splits, device=dy.device)

        def grad(recipe: TrainingRecipe, half: Half) -> GroupedQuantized:
            padded, aligned = pad_sections(dy, sizes, recipe.input)
            q = layer.sections(padded, aligned, recipe.grad, scale, half=half, random=random)
            layer.observe(half.operand("dy"), q.sections())
            if recipe.history:
                layer.record(GRAD, q.required_amax)
            return q

        dx = None
        if wants_x:
            if recipe is None:
                dx = torch.cat(
                    [part @ weight for part, weight in zip(torch.split(dy, ctx.splits), weights, strict=True)]
                )
            else:
                a = grad(recipe, Half.ROW)
                pairs = zip(weights, ctx.halves, strict=True)
                b = [layer.weight_operand(weight, halves, recipe, scales, half=Half.COLUMN) for weight, halves in pairs]
                layer.observe("w columnwise", b)
                dx = unpad_sections(gemm_grouped(a, b, out_dtype=layer.dtype), sizes, recipe.input)
            layer.observe("dx", dx)
            dx = dx.view(x.shape)
        dbiases: list[torch.Tensor | None] = [None] * layer.groups
        if any(wants_bias):
            dbiases = [column_sum(part).value.to(layer.dtype) for part in torch.split(dy, ctx.splits)]
            layer.observe_each("dbias", dbiases)
        dweights: list[torch.Tensor | None] = [None] * layer.groups
        if any(wants_weight):
            if recipe is None:
                pairs = zip(torch.split(dy, ctx.splits), torch.split(rows, ctx.splits), strict=True)
                products = [plain_weight_product(*pair) for pair in pairs]
            else:
                left = grad(recipe, Half.COLUMN).sections()
                padded, aligned = pad_sections(rows, sizes, recipe.input)
                x_columnwise = layer.sections(padded, aligned, recipe.input, column(scales, INPUT), half=Half.COLUMN)
                right = x_columnwise.sections()
                layer.observe("x columnwise", right)
                products = [weight_product(*pair) for pair in zip(left, right, strict=True)]
            dweights = layer.weight_gradients(
                [product if wanted else None for product, wanted in zip(products, wants_weight, strict=True)]
            )
        if recipe is not None:
            layer.end_backward(recipe)
        return dx, None, None, None, *dweights, *dbiases
