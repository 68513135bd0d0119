"""Launching a test's own kernel on the host with arrays in place of addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from narrowgauge.native.runtime import host

Source = Callable[[str], str]
"""The fixture `cuda_source`: a kernel's text to the name of its source."""

ONE = (1, 1, 1)

ARITHMETIC = """
extern "C" __global__ void multiply_add(const float* x, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[3 * i] * x[3 * i + 1] + x[3 * i + 2];
}
extern "C" __global__ void divide(const float* x, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[3 * i] / x[3 * i + 1];
}
"""


def arithmetic(kernel: str) -> tuple[np.ndarray, np.ndarray]:
    """Input of a kernel of ARITHMETIC, (n, 3) float32 of every size, and its result with one rounding an operation."""
    rng = np.random.default_rng(7)
    x = np.ldexp(rng.uniform(-2, 2, (20_000, 3)), rng.integers(-70, 60, (20_000, 3))).astype(np.float32)
    x[:10_000, 2] = -(x[:10_000, 0] * x[:10_000, 1])  # what a fused multiply-add would not cancel
    with np.errstate(over="ignore"):
        expected = x[:, 0] * x[:, 1] + x[:, 2] if kernel == "multiply_add" else x[:, 0] / x[:, 1]
    return x, expected


def run(
    source: str,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    *arguments: np.ndarray | np.generic,
    workers: int = 1,
    flags: tuple[str, ...] = (),
) -> None:
    """One kernel to its end; an array passes its address."""
    plain = [np.uintp(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments]
    host.launch(source, kernel, grid, block, plain, workers=workers, extra_flags=flags)
