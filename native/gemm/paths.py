"""Which kernels make a product, and the order in which each adds."""

from __future__ import annotations

from functools import cache

import torch

PORTABLE, TENSOR, SKINNY = "portable", "tensor", "skinny"

ORDERS = {PORTABLE: "blocks", TENSOR: "decoded-aligned-25-16", SKINNY: "truncating"}
"""The order of sums of each path, as a backend's `gemm_order` names it."""

SMALLEST = 2**24
"""M·N·K from which on tensor cores make a product. On an H200 they take 21 µs for 256³, packing included, the portable
kernel 78 µs (NVFP4; 1024³: 29 and 306 µs); smaller products take a GPU less than three launches take a CPU."""


FEW, MANY = 64, 2**20
"""Rows of a to which, and N·K from which on, b is read once and packed nowhere, where those kernels take both. On an
H200 16 rows by N = K = 8192 take 17 µs (NVFP4), 20 µs (MXFP8, FP8), torch's bfloat16 product 35 µs; FP8 on the path of
tensor cores 140 µs, and with scales of blocks, which that path has not, 2.7 ms by the portable kernel. 64 rows take 58,
60 and 45 µs, torch's product 39 µs, FP8 on the path of tensor cores 140 µs."""


def path_of(m: int, n: int, k: int, rule: str, device: torch.device, *, skinny: bool = False) -> str:
    """The path of a product (M, K) by (N, K) of a rule (`native.gemm.operands.rule_of`) on a device: a key of `ORDERS`.

    Tensor cores are Hopper's, and take what is a bfloat16 number with the scale of its block: FP8 with float32 scales
    of blocks is none. `skinny`: whether `native.gemm.skinny.takes` the operands.
    """
    if skinny and device.type == "cuda" and m <= FEW and n * k >= MANY and _capability(device) == (9, 0):
        return SKINNY
    if device.type == "cuda" and rule != "fp8_block" and m * n * k >= SMALLEST and _capability(device) == (9, 0):
        return TENSOR
    return PORTABLE


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
