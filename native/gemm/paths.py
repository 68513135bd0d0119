"""Choice of the kernels of a GEMM, and their order of summation."""

from __future__ import annotations

import os
from functools import cache

import torch

PORTABLE, TENSOR, FP8, SKINNY = "portable", "tensor", "fp8", "skinny"

ORDERS = {PORTABLE: "blocks", TENSOR: "decoded-aligned-25-16", FP8: "aligned-13-32-128", SKINNY: "truncating"}
"""Path to its order of summation, as named by `gemm_order` of a backend. With block scales the promotion of FP8 is part
of the operation, so `order_of` names the order of a block."""

SMALLEST = 2**24
"""Smallest M·N·K of the tensor core path. On an H200 it takes 21 µs for 256³ including the dequantization, the portable
kernel 78 µs (NVFP4; 1024³: 29 and 306 µs). A smaller GEMM takes a GPU less time than three launches take a CPU."""


FEW, FEW_FP8, MANY = 64, 32, 2**20
"""Largest M and smallest N·K of the skinny path, which reads b once and does not dequantize it to memory. FEW_FP8:
largest M of operands that the FP8 path takes too. On an H200 16 rows by N = K = 8192 take 17 µs (NVFP4), 20 µs (MXFP8,
FP8), torch's bfloat16 product 35 µs, the FP8 path 27 µs. 64 rows take 58, 60 and 45 µs, torch's product 38 µs, the FP8
path 28 µs (tensor scales) and 36 µs (block scales)."""


SLICES, SMALLEST_SLICE = (8, 4, 2), 1024
"""Numbers of slices of K of the paths of tensor cores, and the fewest columns of a slice. A cluster of thread blocks
has the slices of an output tile. On an H200 128 rows by N = K = 8192 of FP8 take 31 µs in two slices, 48 µs in one, and
43 µs in four: 32 clusters of four blocks do not run at once."""


BFLOAT16 = "NARROWGAUGE_FP8_THROUGH_BFLOAT16"
"""Environment variable: with "1", FP8 with tensor scales takes the bfloat16 tensor cores, whose sums have 25 fraction
bits instead of 13, at half the speed."""


def path_of(
    m: int, n: int, k: int, family: str, device: torch.device, *, skinny: bool = False, fp8: bool = False
) -> str:
    """Path of a GEMM (M, K) by (N, K) on a device: a key of `ORDERS`.

    `family`: `native.gemm.operands.product_family`. `skinny`, `fp8`: whether `native.gemm.skinny.takes` the operands,
    and whether `native.gemm.wgmma_fp8.takes` them. The paths of tensor cores need Hopper. TENSOR needs operands that
    are bfloat16 numbers with their block scales, which FP8 with float32 block scales is not."""
    if device.type != "cuda" or _capability(device) != (9, 0):
        return PORTABLE
    fp8 = fp8 and not (family == "fp8_tensor" and os.environ.get(BFLOAT16) == "1")
    if skinny and m <= (FEW_FP8 if fp8 else FEW) and n * k >= MANY:
        return SKINNY
    if m * n * k < SMALLEST:
        return PORTABLE
    if fp8:
        return FP8
    return PORTABLE if family == "fp8_block" else TENSOR


def order_of(path: str, family: str, slices: int = 1) -> str:
    """Order of the sums of a path: a name of `spec.summation.ORDERS`, or "truncating". `slices`: `slices_of`."""
    order = "aligned-13-32" if (path, family) == (FP8, "fp8_block") else ORDERS[path]
    return order if slices == 1 else f"split-{slices}-{order}"


def tiles_of(m: int, n: int) -> int:
    """Output tiles of 128×256 of the paths of tensor cores."""
    return -(-m // 128) * -(-n // 256)


def slices_of(m: int, n: int, k: int, multiprocessors: int) -> int:
    """Slices of K of the paths of tensor cores: 8, 4, 2 or 1, as many as a GPU with this many multiprocessors runs at
    once.

    Larger clusters leave multiprocessors idle: they fill three quarters of the GPU at most. All slices have equally
    many columns, at least SMALLEST_SLICE and a multiple of 128."""
    tiles = tiles_of(m, n)
    if not tiles or k % 128:
        return 1
    filled = {count: multiprocessors if count == 2 else multiprocessors * 3 // 4 for count in SLICES}
    fitting = (count for count in SLICES if count * tiles <= filled[count] and count * SMALLEST_SLICE <= k)
    return next((count for count in fitting if k // 128 % count == 0), 1)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
