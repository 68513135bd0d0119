"""The update of delayed scaling: the next history of amaxes and the next scales."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.guarded_memory import dense
from narrowgauge.harness.backends.results import TensorForm
from narrowgauge.harness.checks.exact import exact_floats
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import float_views, plain
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.harness.operations.update_scale.case import UpdateScaleCase
from narrowgauge.harness.operations.update_scale.deviations import wrong_histories, wrong_scales
from narrowgauge.spec.recipes import find_recipe


def judge_update_scale(case: UpdateScaleCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge update_scale of a history (H, N) and its N scales: both are exact."""
    recipe, history, scale = find_recipe(case.recipe), inputs.x, inputs["scale.x"]

    def call(given: Tensors) -> Tensors:
        forms = {name: TensorForm(tuple(tensor.shape), tensor.dtype) for name, tensor in given.items()}
        return backend.results("update_scale", forms, given["history"], given["scale"], recipe)

    outputs, protection, seconds = repeated(backend, history.device, {"history": history, "scale": scale}, call)
    expected = reference.update_scale(history, scale, recipe)
    outcome = Outcome(protection, outputs, seconds=seconds)
    outcome.causes["history"] = partial(wrong_histories, history, scale, dense(outputs["history"]), recipe)
    outcome.causes["scale"] = partial(wrong_scales, history, scale, dense(outputs["scale"]), recipe)
    rolled, updated = outputs["history"], outputs["scale"]
    outcome.stages.append(history_stage("history", rolled, expected[0], history))
    outcome.stages.append(scale_stage("scale", updated, expected[1], (history, scale)))
    outcome.actual, outcome.expected = updated, expected[1]
    return outcome


def history_stage(stage: str, actual: torch.Tensor, expected: torch.Tensor, before: torch.Tensor) -> StageResult:
    """Compare a history (H, N) with the right history, and show the history before the update."""

    def describe(row: int, column: int) -> dict[str, Any]:
        here = (row, column)
        return {
            "row": row, "tensor": column, "before": plain(float(before[here])),
            **float_views(expected[here], actual[here]),
        }  # fmt: skip

    return exact_floats(stage, actual, expected, noun="amaxes", describe=describe)


def scale_stage(
    stage: str, actual: torch.Tensor, expected: torch.Tensor, before: tuple[torch.Tensor, torch.Tensor]
) -> StageResult:
    """Compare scales (N,) with the right ones, and show the history (H, N) and the scales before the update."""
    history, scale = before

    def describe(_: int, column: int) -> dict[str, Any]:
        amaxes = history[:, column]
        return {
            "tensor": column, "before": plain(float(scale[column])), "first_amax": plain(float(amaxes[0])),
            "largest_amax": plain(float(amaxes.nan_to_num(nan=0.0, posinf=torch.inf).amax())),
            **float_views(expected[column], actual[column]),
        }  # fmt: skip

    one, other = actual.unsqueeze(0), expected.unsqueeze(0)
    return exact_floats(stage, one, other, noun="scales", describe=describe)
