"""Timing of transform."""

from __future__ import annotations

from functools import partial

from narrowgauge.harness.operations.timing.judge_outputs import judge_rotated
from narrowgauge.harness.operations.timing.operation_bench import (
    COPY,
    BenchInputs,
    BenchTask,
    OperationBench,
    PreparedTask,
)
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe


def _prepare(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    recipe, x = find_recipe(task.recipe), inputs.matrix(task.shape)
    copy, copied = inputs.copy(x)
    return PreparedTask(
        native=[partial(native.transform, x_copy, recipe) for (x_copy,) in inputs.copies(x)],
        reference=[partial(reference.transform, x, recipe)],
        judge=lambda rotated: judge_rotated(rotated, x, recipe),
        read=x.nbytes, ceilings={COPY: copy}, elements=x.numel(), flop=4 * x.numel(), copied=copied,
    )  # fmt: skip


BENCH = OperationBench(rank=2, rows=[("transform", "nvfp4-rht", "")], prepare=_prepare)
