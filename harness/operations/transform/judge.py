"""The rotation alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.guarded_memory import dense
from narrowgauge.harness.backends.results import TensorForm
from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.exact import exact_floats
from narrowgauge.harness.checks.finding import float_view
from narrowgauge.harness.checks.rounding_boundary import boundary_floats
from narrowgauge.harness.inputs.inputs import Inputs, laid_out
from narrowgauge.harness.operations.quantize.judge import rotates_freely
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import Subject, float_views
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.harness.operations.stages.rows import FAMILY, Independent, add_rows
from narrowgauge.harness.operations.transform.case import TransformCase
from narrowgauge.harness.operations.transform.deviations import wrong_rotations
from narrowgauge.spec.recipes import find_recipe


def judge_transform(case: TransformCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge transform of x (M, K): exact if the backend declares the order of its sums, else bounded."""
    recipe, x = find_recipe(case.recipe), inputs.x
    subject = Subject(x, recipe, free=rotates_freely(backend))

    def call(given: Tensors) -> Tensors:
        form = {"output": TensorForm(tuple(given["x"].shape), x.dtype)}
        return backend.results("transform", form, given["x"], recipe)

    outputs, protection, seconds = repeated(backend, x.device, {"x": laid_out(x, case.view)}, call)
    outcome = Outcome(protection, outputs, seconds=seconds)
    add_rotated(outcome, subject, outputs["output"])
    if (case.inputs, case.view) == (FAMILY, "contiguous") and not rotates_freely(backend):
        add_rows(outcome, Independent(len(x), {"x": x}, call), backend)
    return outcome


def add_rotated(outcome: Outcome, subject: Subject, output: torch.Tensor) -> None:
    """Judge the rotation (M, K) of the matrix of `subject`, and keep it."""
    recipe, x = subject.recipe, subject.matrix
    expected = reference.transform(x, recipe)
    outcome.actual, outcome.expected = output, expected
    free = subject.rule == "boundary"
    outcome.causes["output"] = partial(wrong_rotations, x, dense(output), recipe, free)

    def describe(row: int, column: int) -> dict[str, Any]:
        here = (row, column)
        value, raw = float_view(x[here])
        group, place = divmod(column, subject.group)
        element = {"row": row, "column": column, "group": group, "column_in_group": place, "input": value}
        element |= {"input_bits": raw, **float_views(expected[here], output[here])}
        if outcome.ends is not None:
            for name, end in zip(("lower", "upper"), outcome.ends, strict=True):
                element[name], element[f"{name}_bits"] = float_view(end[here])
        return element

    if subject.rule == "exact" or equal_bits(output, expected):
        stage = exact_floats("output", output, expected, noun="rotated elements", describe=describe)
        stage = replace(stage, rule=subject.rule)
    else:
        interval = subject.interval
        outcome.ends = (interval.lower, interval.upper)
        stage = boundary_floats(
            "output", output, expected, outcome.ends, subject.sources(), free=interval.undetermined,
            noun="rotated elements", describe=describe,
        )  # fmt: skip
    outcome.stages.append(stage)
