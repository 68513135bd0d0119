"""Call of update_scale in conventional tests."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.harness.operations.stages.sample import Door, Parts, SampleInputs


def _update_scale(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    history, scale = inputs.x[:16].float().abs(), inputs.x[16].float().abs()
    new_history, new_scale = ops.update_scale(history, scale, inputs.r)
    return new_scale, {"history": new_history, "scale": new_scale}


DOORS = {"update_scale": Door(_update_scale)}
