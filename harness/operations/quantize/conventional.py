"""Call of dequantize in conventional tests; quantize is tested by gemm."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.harness.operations.stages.sample import Door, Parts, SampleInputs, options_of


def _dequantize(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    values = ops.dequantize(ops.quantize(inputs.x, inputs.r, **options_of(inputs.x, inputs.r, 0)), torch.bfloat16)
    return values, {"values": values}


DOORS = {"dequantize": Door(_dequantize, gives_x=True)}
