"""Call of transform in conventional tests."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.harness.operations.stages.sample import Door, Parts, SampleInputs


def _transform(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    rotated = ops.transform(inputs.x, inputs.r)
    return rotated, {"rotated": rotated}


DOORS = {"transform": Door(_transform)}
