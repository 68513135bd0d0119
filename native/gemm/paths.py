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


FEW, MANY = 64, 2**20
"""Largest M and smallest N·K of the skinny path, which reads b once and does not dequantize it to memory. On an H200
16 rows by N = K = 8192 take 17 µs (NVFP4), 20 µs (MXFP8, FP8), torch's bfloat16 product 35 µs; FP8 with tensor scales
takes 140 µs on the tensor core path, and FP8 with block scales, which that path lacks, 2.7 ms by the portable kernel.
64 rows take 58, 60 and 45 µs, torch's product 39 µs, FP8 on the tensor core path 140 µs."""


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
    if skinny and m <= FEW and n * k >= MANY:
        return SKINNY
    if m * n * k < SMALLEST:
        return PORTABLE
    if fp8 and not (family == "fp8_tensor" and os.environ.get(BFLOAT16) == "1"):
        return FP8
    return PORTABLE if family == "fp8_block" else TENSOR


def order_of(path: str, family: str) -> str:
    """Order of the sums of a path: a name of `spec.summation.ORDERS`, or "truncating"."""
    return "aligned-13-32" if (path, family) == (FP8, "fp8_block") else ORDERS[path]


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
