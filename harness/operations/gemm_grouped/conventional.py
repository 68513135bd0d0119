"""Calls of gemm_grouped in conventional tests."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.harness.operations.stages.sample import SIZES, Door, Parts, SampleInputs, bytes_of, options_of


def _gemm_grouped(ops: Any, inputs: SampleInputs, *, padded: bool = False) -> tuple[torch.Tensor, Parts]:
    sizes = torch.tensor(SIZES)
    recipe, w_recipe, _ = inputs.recipes
    x, counts = (ops.pad_sections(inputs.x, sizes, recipe)) if padded else (inputs.x, sizes)
    a = ops.quantize_grouped(x, counts, recipe, **options_of(inputs.x, recipe, 0, len(SIZES)))
    b = ops.quantize(inputs.w, w_recipe, **options_of(inputs.w, w_recipe, 1))
    out = ops.gemm_grouped(a, [b] * len(SIZES), out_dtype=torch.bfloat16)
    unpadded = ops.unpad_sections(out, sizes, recipe) if padded else out
    return unpadded, {"padded": x, **bytes_of(a, "x"), **bytes_of(b, "w"), "output": out}


def _gemm_padded(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    return _gemm_grouped(ops, inputs, padded=True)


DOORS = {"gemm_grouped": Door(_gemm_grouped), "gemm_grouped of padded sections": Door(_gemm_padded)}
