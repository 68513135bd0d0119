"""The gemm of a backend as a function that is probed, and the declaration of the order that is found."""

from __future__ import annotations

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.checks.order.masks import GemmFunction
from narrowgauge.harness.checks.order.order import Order, in_slices
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.quantized import Quantized, scales_shape
from narrowgauge.spec.recipes import Recipe


def declaration_for(order: Order, recipe: Recipe) -> str | None:
    """The declaration of an order for a recipe, whose scales were 1; None if no declaration is known to be right.

    Slices of chains, "split-<n>", sum the blocks of scales apart, so chains of one block are "blocks" and longer chains
    have no declaration. With float32 block scales an order names the sum of a block, which the chains of the whole
    product do not tell.
    """
    if recipe.spans_k:
        return order.declares
    if recipe.scale is FP32:
        return None
    if order.width == 1 and (order.declares or "").startswith("split-"):
        return "blocks" if order.tree == in_slices(order.shape[1], recipe.block[1]) else None
    return order.declares


def operand_dtype(recipe: Recipe) -> torch.dtype:
    """The dtype of a recipe's elements. Raises ValueError for elements without the range of a mask."""
    dtypes = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
    if recipe.element.name not in dtypes:
        raise ValueError(
            f"elements {recipe.element.name} of {recipe} cannot be probed; take a recipe with E4M3 or E5M2, such as "
            "fp8-current-e4m3 or mxfp8-e4m3"
        )
    return dtypes[recipe.element.name]


def product_of(backend: Backend, recipe: Recipe, out_dtype: torch.dtype = torch.float32) -> GemmFunction:
    """The gemm of a backend as a function of elements: every scale is 1, the output has `out_dtype`."""

    def operand(x: torch.Tensor) -> Quantized:
        rows, columns = x.shape
        shape = scales_shape((rows, columns), recipe)
        one = 1.0 if recipe.scale is FP32 else recipe.scale.values.index(1.0)
        dtype = torch.float32 if recipe.scale is FP32 else torch.uint8
        scales = torch.full(shape, one, dtype=dtype, device=x.device)
        return Quantized(x.view(torch.uint8), scales, None, recipe, (rows, columns))

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = backend.call("gemm", operand(a), operand(b), out_dtype=out_dtype)
        return result

    return product
