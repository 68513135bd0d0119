"""Calls of swizzle and unswizzle in conventional tests."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.harness.operations.stages.sample import SUM, Door, Parts, SampleInputs
from narrowgauge.reference import ops as reference


def _scales(inputs: SampleInputs) -> torch.Tensor:
    return (inputs.x.view(torch.uint8)[:, : SUM // 16]).contiguous()


def _swizzle(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    swizzled = ops.swizzle(_scales(inputs))
    return swizzled.float(), {"swizzled": swizzled}


def _unswizzle(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    scales = _scales(inputs)
    linear = ops.unswizzle(reference.swizzle(scales), tuple(scales.shape))
    return linear.float(), {"linear": linear}


DOORS = {"swizzle": Door(_swizzle), "unswizzle": Door(_unswizzle)}
