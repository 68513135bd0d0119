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

SECONDS = {
    "quantize": (7e-3, 210e-9), "quantize-grouped": (1e-3, 320e-9), "transform": (3.5e-3, 130e-9),
    "swizzle": (2.8e-3, 120e-9), "update-scale": (2.3e-3, 40e-9), "gemm": (11e-3, 40e-9),
    "gemm-grouped": (13e-3, 140e-9), "gemm-quantized": (12e-3, 185e-9),
    "linear": (60e-3, 200e-9), "layernorm-linear": (80e-3, 200e-9), "grouped-linear": (150e-3, 200e-9),
    "transformer-layer": (300e-3, 200e-9),
}  # fmt: skip
"""Seconds of a core for a case of an operation, and for each element of its work: fitted to the quick tier on one core
of a CPU. Shards divide by their ratios: the slowest of 16 shards takes 7 % longer than the mean, 0 % by recorded
times. The number of workers at the start of a run follows from their sum."""


def estimated_seconds(case: Case) -> float:
    """Seconds of a core to run and judge a case, if its kernels are compiled."""
    whole, element = SECONDS[case.operation]
    return whole + element * work(case)


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
