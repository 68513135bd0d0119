"""Work and time of a case, estimated before the run. Small cases are judged on the CPU, also for a GPU."""

from __future__ import annotations

import math

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.gemm import ProductCase
from narrowgauge.harness.cases.modules import ModuleCase
from narrowgauge.harness.cases.quantize import QuantizeCase

SMALL, SMALL_MODULE = 1 << 24, 1 << 27
"""Work, in elements, below which a case for a GPU is judged on the CPU (`home_of`): of an operation, and of a module,
which has many stages and needs more launches for as much work. Linear layers of 4x128x1024x4096 take a core 6 to 20 s,
and an H200, shared with other processes, 0.3 to 1.3 s."""
SECTION = 1 << 12
"""Work of an additional section, in elements: measured, 1.6 ms compared with 0.4 µs an element."""

CASE_SECONDS, ELEMENT_SECONDS = 0.06, 8e-8
"""Seconds of a core for a case, and for each element of its work. Measured: 216 quantize cases of 2^18 elements take
0.077 s each, 8 cases of 2^21 elements 0.23 s."""


def estimated_seconds(case: Case) -> float:
    """Seconds of a core to run and judge a case, if its kernels are compiled. Other operations than quantize take up to
    several times as long."""
    return CASE_SECONDS + ELEMENT_SECONDS * work(case)


def work(case: Case) -> int:
    """Work to run and judge a case, in elements."""
    sections = len(case.section_sizes)
    if isinstance(case, ModuleCase):
        # Every layer and step has three products; their operands are quantized in both orientations.
        step = 0
        for layer in case.layers:
            x, w = case.rows * (layer.inner + layer.outer), layer.inner * layer.outer * max(1, layer.groups)
            step += 2 * (x + w) + 3 * case.rows * layer.inner * layer.outer // 32
        return case.steps * step + SECTION * sections
    if isinstance(case, ProductCase):
        rows, depth, columns = case.shape
        elements = rows * depth + max(1, sections) * columns * depth + rows * depth * columns // 32
    else:
        both = isinstance(case, QuantizeCase) and case.usage == "both"
        elements = math.prod(case.shape) * (2 if both else 1)
    return elements + SECTION * sections


def home_of(case: Case, device: str) -> str:
    """Device of the inputs, the reference and the checks of a case that runs on `device`: `device` itself or the CPU.

    Judging a small case is a thousand small kernels, and only one of several processes at a time has the GPU.
    """
    return "cpu" if work(case) < (SMALL_MODULE if isinstance(case, ModuleCase) else SMALL) else device
