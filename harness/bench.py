"""How fast: the reference and the native kernels beside ceilings measured in the same run.

Rates are medians; a ratio of two rows of one run is worth more than either, since machines differ and are noisy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from harness.operations.repeated import timed
from native import ops as native
from reference import ops as reference
from reference.gemm import operand

REPEATS = 9
QUANTIZE = {"cpu": 4096, "cuda": 16384}
"""Rows and columns of the matrix that is quantized: on a GPU several times its L2."""
GEMM = 1024
PLAIN = ("mxfp8-e4m3", "fp8-block-1x128", "fp8-current")
"""Recipes of other formats: quantized along rows, and in both orientations."""
VARIANTS = ("nvfp4-2d", "nvfp4-rht", "nvfp4-rht-sr", "nvfp4-rowscaled", "nvfp4-4over6-448-mae")


@dataclass(frozen=True)
class Row:
    """One timed operation: median milliseconds, spread (slowest over fastest), and work done."""

    name: str
    milliseconds: float
    spread: float
    work: float
    unit: str
    """elem/s, or MAC/s: multiply-adds."""
    ceiling: float | None = None
    """Milliseconds of what bounds it, measured in this run."""

    @property
    def rate(self) -> float:
        """Work a second, in millions."""
        return self.work / self.milliseconds / 1e3


def median(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Median milliseconds of `call` and slowest over fastest, after one call that does not count."""
    call()
    seconds = []
    for _ in range(REPEATS):
        seconds.append(timed(device, call)[1])
    return statistics.median(seconds) * 1e3, max(seconds) / min(seconds)


def measure(device_name: str) -> list[Row]:
    """Quantize (bf16, M elements/s beside a copy) and the GEMM 1024³ (M multiply-adds/s beside a float64 matmul)."""
    device = torch.device(device_name)
    generator = torch.Generator().manual_seed(0)
    size = QUANTIZE[device.type]
    x = torch.randn(size, size, generator=generator).bfloat16().to(device)
    amax = native.amax(x)
    rows: list[Row] = []

    def add(name: str, call: Callable[[], object], work: float, unit: str, ceiling: Row | None) -> Row:
        milliseconds, spread = median(call, device)
        row = Row(name, milliseconds, spread, work, unit, None if ceiling is None else ceiling.milliseconds)
        rows.append(row)
        return row

    n, elements = x.numel(), "elem/s"
    target = torch.empty_like(x)
    copy = add(f"copy {size}² bf16", lambda: target.copy_(x), n, elements, None)
    add("reference quantize nvfp4", lambda: reference.quantize(x, "nvfp4"), n, elements, copy)
    add("native quantize nvfp4", lambda: native.quantize(x, "nvfp4"), n, elements, copy)
    add("native quantize nvfp4, amax given", lambda: native.quantize(x, "nvfp4", amax=amax), n, elements, copy)
    for recipe in (*VARIANTS, *PLAIN):
        random = (0, 0) if recipe.endswith("-sr") else None
        for name, doors in (("reference", reference), ("native", native)):
            one, both = (partial(door, x, recipe, random=random) for door in (doors.quantize, doors.quantize_both))
            add(f"{name} quantize {recipe}", one, n, elements, copy)
            add(f"{name} quantize_both {recipe}", both, n, elements, copy)
    quantized = native.quantize(x, "nvfp4")
    add("native dequantize to bf16", lambda: native.dequantize(quantized, torch.bfloat16), n, elements, copy)

    a, b = (reference.quantize(torch.randn(GEMM, GEMM, generator=generator).to(device), "nvfp4") for _ in range(2))
    left, right = operand(a), operand(b)
    work, unit = float(GEMM**3), "MAC/s"
    matmul = add(f"float64 matmul {GEMM}³ of the operands", lambda: left @ right.T, work, unit, None)
    add("reference gemm, exact", lambda: reference.gemm(a, b, out_dtype=torch.float32), work, unit, matmul)
    add("native gemm", lambda: native.gemm(a, b, out_dtype=torch.float32), work, unit, matmul)
    return rows
