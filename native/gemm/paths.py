"""Choice of the kernels of a GEMM, and their order of summation."""

from __future__ import annotations

from functools import cache

import torch

PORTABLE, TENSOR, SKINNY = "portable", "tensor", "skinny"

ORDERS = {PORTABLE: "blocks", TENSOR: "decoded-aligned-25-16", SKINNY: "truncating"}
"""Path to its order of summation, as named by `gemm_order` of a backend."""

SMALLEST = 2**24
"""Smallest M·N·K of the tensor core path. On an H200 it takes 21 µs for 256³ including the dequantization, the portable
kernel 78 µs (NVFP4; 1024³: 29 and 306 µs). A smaller GEMM takes a GPU less time than three launches take a CPU."""


FEW, MANY = 64, 2**20
"""Largest M and smallest N·K of the skinny path, which reads b once and does not dequantize it to memory. On an H200
16 rows by N = K = 8192 take 17 µs (NVFP4), 20 µs (MXFP8, FP8), torch's bfloat16 product 35 µs; FP8 with tensor scales
takes 140 µs on the tensor core path, and FP8 with block scales, which that path lacks, 2.7 ms by the portable kernel.
64 rows take 58, 60 and 45 µs, torch's product 39 µs, FP8 on the tensor core path 140 µs."""


def path_of(m: int, n: int, k: int, family: str, device: torch.device, *, skinny: bool = False) -> str:
    """Path of a GEMM (M, K) by (N, K) on a device: a key of `ORDERS`.

    `family`: `native.gemm.operands.product_family`. `skinny`: whether `native.gemm.skinny.takes` the operands. The
    tensor core path needs Hopper, and operands that are bfloat16 numbers with their block scales. FP8 with float32
    block scales is not."""
    if skinny and device.type == "cuda" and m <= FEW and n * k >= MANY and _capability(device) == (9, 0):
        return SKINNY
    if device.type == "cuda" and family != "fp8_block" and m * n * k >= SMALLEST and _capability(device) == (9, 0):
        return TENSOR
    return PORTABLE


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
