"""Calls of gemm in conventional tests."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.harness.operations.stages.sample import Door, Parts, SampleInputs, bytes_of, options_of
from narrowgauge.reference import ops as reference


def _product(ops: Any, inputs: SampleInputs, a: Any, b: Any, **options: Any) -> tuple[torch.Tensor, Parts]:
    out = ops.gemm(a, b, out_dtype=torch.bfloat16, **options)
    return out, {**bytes_of(a, "x"), **bytes_of(b, "w"), "output": out}


def _gemm(ops: Any, inputs: SampleInputs, **options: Any) -> tuple[torch.Tensor, Parts]:
    recipe, w_recipe, _ = inputs.recipes
    a = ops.quantize(inputs.x, recipe, **options_of(inputs.x, recipe, 0))
    b = ops.quantize(inputs.w, w_recipe, **options_of(inputs.w, w_recipe, 1))
    return _product(ops, inputs, a, b, **options)


def _gemm_with_c(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    return _gemm(ops, inputs, c=inputs.c)


def _gemm_nt(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    halves = [
        ops.quantize_both(matrix.T.contiguous(), recipe, rowwise=False, **options_of(matrix, recipe, number))[1]
        for number, (matrix, recipe) in enumerate(zip((inputs.x, inputs.w), inputs.recipes, strict=False))
    ]
    return _product(ops, inputs, *halves)


def _gemm_swizzled(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    operands: list[Any] = []
    parts: Parts = {}
    for name, matrix, recipe in zip("xw", (inputs.x, inputs.w), inputs.recipes, strict=False):
        swizzled = ops.quantize(matrix, recipe, swizzled=True)
        linear = ops.quantize(matrix, recipe)
        # No product takes swizzled scales: they are unswizzled first, as a user of the kernel would do.
        scales = reference.unswizzle(swizzled.scales, linear.scales.shape)
        operands.append(
            type(linear)(swizzled.codes, scales, swizzled.amax, recipe, linear.shape, swizzled.tensor_scale)
        )
        parts |= bytes_of(swizzled, f"{name}, swizzled")
    out, of_product = _product(ops, inputs, *operands)
    return out, parts | of_product


DOORS = {
    "gemm": Door(_gemm),
    "gemm with c": Door(_gemm_with_c),
    "gemm of columnwise halves": Door(_gemm_nt),
    "gemm of swizzled operands": Door(_gemm_swizzled),
}
