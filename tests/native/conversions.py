"""The device functions of formats.cuh as kernels, and their test inputs."""

from __future__ import annotations

import numpy as np
import torch

from narrowgauge.native.runtime.launch import launch
from tests.native.devices import ops

_MAP = """
extern "C" __global__ void {name}(const {given}* x, {got}* out, i64 n) {{
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) {body};
}}
"""

# Name: type of the input, type of the output, statement for element i, NumPy dtype of the output.
KERNELS = {
    "bf16_to_float": ("bf16", "float", "out[i] = to_float(x[i])", "u4"),
    "fp16_to_float": ("fp16", "float", "out[i] = to_float(x[i])", "u4"),
    "bf16_from_float": ("float", "bf16", "from_float(x[i], out[i])", "u2"),
    "fp16_from_float": ("float", "fp16", "from_float(x[i], out[i])", "u2"),
    "e2m1_from_floats": ("float", "u8", "out[i] = static_cast<u8>(e2m1_from_float(x[i]))", "u1"),
    "e2m1x2_from_floats": ("float", "u8", "out[i] = e2m1x2_from_float(x[2 * i], x[2 * i + 1])", "u1"),
    "e2m1_to_floats": ("u8", "float", "out[i] = e2m1_to_float(x[i])", "u4"),
    "e8m0_up": ("float", "u8", "out[i] = e8m0_from_float(x[i], 1u, 0)", "u1"),
    "e8m0_down": ("float", "u8", "out[i] = e8m0_from_float(x[i], 1u << 23, 0)", "u1"),
    "e8m0_down_and_8_less": ("float", "u8", "out[i] = e8m0_from_float(x[i], 1u << 23, 8)", "u1"),
    "e8m0_to_floats": ("u8", "float", "out[i] = e8m0_to_float(x[i])", "u4"),
}
for _name in ("e2m3", "e3m2", "e4m3", "e5m2"):
    KERNELS[f"{_name}_from_floats"] = ("float", "u8", f"out[i] = {_name}_from_float(x[i])", "u1")
    _pair = f"out[i] = pair_from_float<{_name.upper()}>(x[2 * i], x[2 * i + 1])"
    KERNELS[f"{_name}x2_from_floats"] = ("float", "u16", _pair, "u2")
    KERNELS[f"{_name}_to_floats"] = ("u8", "float", f"out[i] = {_name}_to_float(x[i])", "u4")
TEXT = '#include "common/formats.cuh"\nusing namespace narrowgauge;\n' + "".join(
    _MAP.format(name=name, given=given, got=got, body=body) for name, (given, got, body, _) in KERNELS.items()
)

EVERY_HALF = np.arange(1 << 16, dtype=np.uint16)
EVERY_BYTE = np.arange(1 << 8, dtype=np.uint8)


def convert(source: str, kernel: str, x: np.ndarray, flags: tuple[str, ...] = ()) -> np.ndarray:
    """Bits that `kernel` of `source` (made of TEXT) gives for each element of `x`, or each pair of elements."""
    dtype = np.dtype(KERNELS[kernel][3])
    given = torch.from_numpy(x.view(np.uint8).copy()).to(ops.device)
    count = x.size // 2 if "x2_" in kernel else x.size
    out = torch.zeros(count * dtype.itemsize, dtype=torch.uint8, device=given.device)
    grid, arguments = (-(-count // 256),), (given, out, np.int64(count))
    launch(source, kernel, grid, (256,), arguments, device=given.device, extra_flags=flags)
    return out.cpu().numpy().view(dtype)


def around(exact: np.ndarray) -> np.ndarray:
    """float32 numbers ± 0 and 1 ulp, with both signs."""
    bits = np.abs(exact).astype(np.float32).view(np.uint32)
    near = np.concatenate([bits, bits + 1, np.maximum(bits, 1) - 1]).view(np.float32)
    return np.concatenate([near, -near])


def bf16_values() -> np.ndarray:
    """All 65536 bfloat16 patterns as float32 bits, with NaN of every payload."""
    return (EVERY_HALF.astype(np.uint32) << 16).view(np.float32)


def fp16_decisions() -> np.ndarray:
    """Every finite float16, every midpoint, and the midpoint above the largest number, 65520, ± 1 ulp."""
    points = np.append(np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64), 65536.0)
    return np.concatenate([around(points), around((points[:-1] + points[1:]) / 2)])


def bf16_decisions() -> np.ndarray:
    """Every midpoint of bfloat16, and the midpoint above the largest number, ± 1 ulp, and beside every NaN."""
    midpoints = (np.arange(0x8000, dtype=np.uint32) << 16) + 0x8000
    bits = np.concatenate([midpoints - 1, midpoints, midpoints + 1])
    return np.concatenate([bits, bits | 0x80000000]).view(np.float32)


def powers() -> np.ndarray:
    """Every power of two of float32 and its neighbours, numbers between two powers, 0, infinity and NaN."""
    exact = np.ldexp([1.0, 1.5], np.arange(-149, 128)[:, None]).astype(np.float32).ravel()
    near = np.abs(around(exact))
    return np.concatenate([near, np.array([0, np.inf, np.nan, np.finfo(np.float32).max], np.float32)])


def grid_decisions(values: np.ndarray, beyond: float) -> np.ndarray:
    """Every value of a narrow format and every midpoint, also to `beyond`, ± 1 ulp."""
    points = np.append(np.unique(np.abs(values.astype(np.float64))), beyond)
    return np.concatenate([around(points), around((points[:-1] + points[1:]) / 2)])
