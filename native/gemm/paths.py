"""Choice of the kernels of a GEMM, and their order of summation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache

import torch

PORTABLE, TENSOR, FP8, SKINNY, FUSED = "portable", "tensor", "fp8", "skinny", "fused"

ORDERS = {
    PORTABLE: "blocks", TENSOR: "decoded-aligned-25-16", FUSED: "decoded-aligned-25-16", FP8: "aligned-13-32-128",
    SKINNY: "truncating",
}  # fmt: skip
"""Path to its order of summation, as named by `gemm_order` of a backend. With block scales the promotion of FP8 is part
of the operation, so `order_of` names the order of a block."""

SMALLEST = 2**24
"""Smallest M·N·K of the tensor core path. On an H200 it takes 21 µs for 256³ including the dequantization, the portable
kernel 78 µs (NVFP4; 1024³: 29 and 306 µs). A smaller GEMM takes a GPU less time than three launches take a CPU."""


FEW, FEW_FP8, MANY = 64, 32, 2**20
"""Largest M and smallest N·K of the skinny path, which reads b once and does not dequantize it to memory. FEW_FP8:
largest M of operands that the FP8 path takes too. On an H200 16 rows by N = K = 8192 take 16 µs (NVFP4), 18 µs (MXFP8,
FP8), torch's bfloat16 product 34 µs, an earlier version of the FP8 path 27 µs. 64 rows take 58, 60 and 45 µs, torch's
product 38 µs, the FP8 path 21 µs (tensor scales) and 23 µs (block scales)."""


FEW_FUSED, MOST_FUSED, WIDE = 32, 256, 7168
"""Of operands that the fused path takes: largest M of the skinny path if N is at least WIDE, and largest M of the
fused path. On an H200, N = K = 8192, the fused path takes 27 µs with 64 rows of NVFP4, 28 µs of MXFP8, torch's bfloat16
product 38 µs; with 128 rows 35, 36 and 38 µs; with 256 rows 60, 68 and 50 µs, the path of dequantized tiles 111 and
124 µs. An earlier version took 30 µs with 32 rows on either path, and with 64 rows by N = 2048, K = 7168 22 µs, on the
skinny path 13 µs."""


SLICES, SMALLEST_SLICE = (8, 4, 2), 1024
"""Numbers of slices of K of the paths of tensor cores, and the fewest columns of a slice. A cluster of thread blocks
has the slices of an output tile. On an H200 128 rows by N = K = 8192 of FP8, with tiles of 256 columns, take 31 µs in
two slices, 48 µs in one, and 43 µs in four: 32 clusters of four blocks do not run at once."""


NARROW_SLICES = 4
"""Most slices of K of output tiles with 128 columns: a block stores at least 32 columns. On an H200 128 rows by N = K =
8192 of FP8 take 22.6 µs with these tiles, 30.8 µs with 256 columns, which occupy 64 multiprocessors."""


ROWS_FUSED, ROWS_BESIDE = 768, 640
"""Rows of a section, on average: most of the fused path; fewest from which TENSOR dequantizes matrices beside its
products. On an H200 8 matrices of N = K = 8192 take, in µs, by the fused path, by TENSOR, and by TENSOR with
dequantization beside its products: with 128 rows of NVFP4 each 233, 679 and 1030, MXFP8 266, 757 and 1207; with 640
rows 1078, 1280 and 1220, 1225, 1356 and 1402; with 768 rows 1286, 1447 and 1304, 1467, 1524 and 1473; with 896 rows
1485, 1622 and 1445, 1701, 1701 and 1567. On an H100 768 rows take 1307, 1567 and 1403, 1508, 1727 and 1590."""


BFLOAT16 = "NARROWGAUGE_FP8_THROUGH_BFLOAT16"
"""Environment variable: with "1", FP8 with tensor scales takes the bfloat16 tensor cores, whose sums have 25 fraction
bits instead of 13, at half the speed."""


def path_of(
    m: int,
    n: int,
    k: int,
    family: str,
    device: torch.device,
    *,
    skinny: bool = False,
    fused: bool = False,
    fp8: bool = False,
) -> str:
    """Path of a GEMM (M, K) by (N, K) on a device: a key of `ORDERS`.

    `family`: `native.gemm.operands.product_family`. `skinny`, `fused`, `fp8`: whether `takes` of `native.gemm.skinny`,
    of `fused` and of `wgmma_fp8` accepts the operands. The paths of tensor cores need Hopper. TENSOR needs operands
    that are bfloat16 numbers with their block scales, which FP8 with float32 block scales is not."""
    if not is_hopper(device):
        return PORTABLE
    fp8 = fp8 and not (family == "fp8_tensor" and os.environ.get(BFLOAT16) == "1")
    if n * k >= MANY:
        if skinny and m <= (FEW_FP8 if fp8 else FEW_FUSED if fused and n >= WIDE else FEW):
            return SKINNY
        if fused and m <= MOST_FUSED:
            return FUSED
    if m * n * k < SMALLEST:
        return PORTABLE
    if fp8:
        return FP8
    return PORTABLE if family == "fp8_block" else TENSOR


def order_of(path: str, family: str, slices: int = 1, cuts: Sequence[int] = ()) -> str:
    """Order of the sums of a path: a name of `spec.summation.ORDERS`, or "truncating".

    `slices` of K have equally many columns; if they do not, `cuts` are the first columns of all but the first. FUSED
    adds the sums of neighbouring slices first."""
    order = "aligned-13-32" if (path, family) == (FP8, "fp8_block") else ORDERS[path]
    if path == FUSED and slices > 2:
        order += "-tree"
    if cuts:
        return f"split-at-{'-'.join(map(str, cuts))}-{order}"
    return order if slices == 1 else f"split-{slices}-{order}"


def tiles_of(m: int, n: int, columns: int = 256) -> int:
    """Output tiles of the paths of tensor cores, 128 by `columns`."""
    return -(-m // 128) * -(-n // columns)


def slices_of(m: int, n: int, k: int, multiprocessors: int) -> int:
    """Slices of K of TENSOR and FP8: 8, 4, 2 or 1. All have equally many columns, a multiple of 128."""
    fitting = () if k % 128 else clusters_of(tiles_of(m, n), k, multiprocessors)
    return next((count for count in fitting if k // 128 % count == 0), 1)


def clusters_of(tiles: int, k: int, multiprocessors: int) -> Iterator[int]:
    """Blocks of a cluster that computes an output tile, of a slice of K each: from 8, 4 and 2 the numbers with which a
    GPU with this many multiprocessors runs all clusters at once. A slice has at least SMALLEST_SLICE columns."""
    for count in SLICES if tiles else ():
        if _run_at_once(tiles, count, multiprocessors) and count * SMALLEST_SLICE <= k:
            yield count


def columns_of(m: int, n: int, slices: int, multiprocessors: int) -> int:
    """Columns of an output tile of FP8: 128 if K has slices and the clusters of all tiles run at once, else 256."""
    narrow = 1 < slices <= NARROW_SLICES and _run_at_once(tiles_of(m, n, 128), slices, multiprocessors)
    return 128 if narrow else 256


def _run_at_once(clusters: int, blocks: int, multiprocessors: int) -> bool:
    """Whether a GPU runs this many clusters of 8, 4 or 2 blocks at once. Clusters of 8 and 4 leave multiprocessors
    idle: they fill three quarters of the GPU at most."""
    return clusters * blocks <= (multiprocessors if blocks == 2 else multiprocessors * 3 // 4)


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a GPU with the tensor cores of the paths."""
    return device.type == "cuda" and _capability(device) == (9, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
