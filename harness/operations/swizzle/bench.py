"""Timing of swizzle and unswizzle."""

from __future__ import annotations

from functools import partial

import torch

from narrowgauge.harness.operations.timing.judge_outputs import judge_bytes
from narrowgauge.harness.operations.timing.operation_bench import (
    COPY,
    SAME,
    BenchInputs,
    BenchTask,
    Calls,
    OperationBench,
    PreparedTask,
)
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference


def _prepare(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    """Swizzle or unswizzle of NVFP4 scales, a byte for 16 elements. A GPU copies few bytes at a lower rate, so a copy
    of the same size is the second ceiling.
    """
    rows, columns = task.shape[0], task.shape[1] // 16
    scales = torch.arange(rows * columns, device=inputs.device).mul_(2654435761).bitwise_right_shift_(13)
    scales = scales.to(torch.uint8).view(rows, columns)
    swizzled = reference.swizzle(scales)
    unswizzles = task.operation == "unswizzle"
    source, expected = (swizzled, scales) if unswizzles else (scales, swizzled)
    shape = [(rows, columns)] if unswizzles else []
    copy, copied = inputs.copy(source)
    copies = inputs.copies(source)
    ceilings: dict[str, Calls] = {COPY: copy}
    if inputs.device.type == "cuda":
        ceilings[SAME] = [source_copy.clone for (source_copy,) in copies]
    return PreparedTask(
        native=[partial(getattr(native, task.operation), source_copy, *shape) for (source_copy,) in copies],
        reference=[partial(getattr(reference, task.operation), source, *shape)],
        judge=lambda result: judge_bytes(task.operation, result, expected),
        read=source.nbytes, ceilings=ceilings, elements=scales.numel(), copied=copied, dtype="",
    )  # fmt: skip


BENCH = OperationBench(
    rank=3,
    rows=[("swizzle", "", ""), ("unswizzle", "", "")],
    prepare=_prepare,
    # 64 MB of scales. 16384x16384 has 16 MB, and a copy of 16 MB reaches only 75 % of the rate of a large copy.
    further={"32768x32768": ("*",)},
)
