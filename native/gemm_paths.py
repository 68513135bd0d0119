"""Which kernels make a product, and the order in which each adds."""

from __future__ import annotations

from functools import cache

import torch

PORTABLE, TENSOR = "portable", "tensor"

ORDERS = {PORTABLE: "blocks", TENSOR: "decoded-aligned-25-16"}
"""The order of sums of each path, as `reference.summation.Summation` names it."""

SMALLEST = 2**24
"""M·N·K from which on tensor cores make a product. On an H200 they take 21 µs for 256³, packing included, the portable
kernel 78 µs (NVFP4; 1024³: 29 and 306 µs); smaller products take a GPU less than three launches take a CPU."""


def path_of(m: int, n: int, k: int, rule: str, device: torch.device) -> str:
    """The path of a product (M, K) by (N, K) of a rule (`native.operands.rule_of`) on a device: a key of `ORDERS`.

    Tensor cores are Hopper's, and take what is a bfloat16 number with the scale of its block: FP8 with float32 scales
    of blocks is none.
    """
    if device.type == "cuda" and rule != "fp8_block" and m * n * k >= SMALLEST and _capability(device) == (9, 0):
        return TENSOR
    return PORTABLE


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
