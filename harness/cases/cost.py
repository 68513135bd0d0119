"""How much work a case is, before it runs: enough to tell small cases from large ones."""

from __future__ import annotations

import math

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.parameters import layers_of

SMALL, SMALL_MODULE = 1 << 24, 1 << 27
"""Work, in elements, below which a case of a GPU is judged on the CPU (`home_of`): of an operation, and of a module,
whose many stages are more launches for as much work. Linear layers of 4x128x1024x4096 take a core 6 to 20 s, and an
H200, beside other processes, 0.3 to 1.3 s."""
SECTION = 1 << 12
"""Work of one more section, in elements: measured, 1.6 ms beside 0.4 µs an element."""


def work(case: Case) -> int:
    """What a case costs to run and judge, in elements."""
    sections = len(case.sections) if "grouped" in case.operation else 0
    if case.is_module:
        rows = math.prod(case.shape[:-2])
        # Three products of every layer and step, whose operands are quantized in both orientations.
        matrices = [(rows * (n.inner + n.outer), n.inner * n.outer * max(1, n.groups), n) for n in layers_of(case)]
        one = sum(2 * (x + w) + 3 * rows * n.inner * n.outer // 32 for x, w, n in matrices)
        return case.steps * one + SECTION * sections
    if case.operation.startswith("gemm"):
        rows, depth, columns = case.shape
        elements = rows * depth + max(1, sections) * columns * depth + rows * depth * columns // 32
    else:
        elements = math.prod(case.shape) * (2 if case.usage == "both" else 1)
    return elements + SECTION * sections


def home_of(case: Case, device: str) -> str:
    """Where a case that runs on a device has its inputs and its reference, and is judged: there, or on the CPU.

    Judging a small case is a thousand small kernels, and of several processes one at a time has the GPU.
    """
    return "cpu" if work(case) < (SMALL_MODULE if case.is_module else SMALL) else device
