"""Call of gemm_quantized in conventional tests."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.harness.operations.stages.sample import Door, Parts, SampleInputs, bytes_of, options_of
from narrowgauge.reference import ops as reference


def _gemm_quantized(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    recipe, w_recipe, out_recipe = inputs.recipes
    a = ops.quantize(inputs.x, recipe, **options_of(inputs.x, recipe, 0))
    b = ops.quantize(inputs.w, w_recipe, **options_of(inputs.w, w_recipe, 1))
    scale = torch.tensor([out_recipe.element.max / float(inputs.exact.abs().max())])
    options = {"scale": scale} if out_recipe.delayed else {}
    q = ops.gemm_quantized(a, b, out_recipe, out_dtype=torch.bfloat16, **options)
    return reference.dequantize(q), {**bytes_of(a, "x"), **bytes_of(b, "w"), **bytes_of(q, "output")}


DOORS = {"gemm_quantized": Door(_gemm_quantized)}
