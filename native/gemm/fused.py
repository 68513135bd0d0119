"""GEMM that decodes b in registers, on the tensor cores of a Hopper GPU, by kernels/gemm/sm90/gemm_fused_*.cu.

For few rows of a: b is read once, as codes. a is dequantized to tiles first. MX operands with numbers at the ends of
bfloat16's range are refused as in `native.gemm.wgmma`, and the same second kernel multiplies them."""

from __future__ import annotations

import torch

from narrowgauge.native.gemm.operands import Product
from narrowgauge.native.gemm.paths import clusters_of
from narrowgauge.native.gemm.skinny import takes_operand
from narrowgauge.native.gemm.wgmma import dequantize, fields_of, multiply_refused
from narrowgauge.native.gemm.wgmma_fp8 import tensor_map
from narrowgauge.native.runtime.arguments import blocks_for
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct
from narrowgauge.spec.quantized import Quantized

_PARAMETERS = KernelStruct("gemm/sm90/gemm_fused.cuh", "FusedParameters")
_ROWS, _COLUMNS = 128, 64
"""Rows of b of a block of threads, and columns of K of a step."""
_THREADS = 640
"""Of a block."""
_TOKENS = (64, 128)
"""Rows of a of a block of threads."""
_SHARED_BYTES = 194 * 1024
"""sizeof(FusedShared), plus its alignment to 1024 bytes."""
RUNS = {"nvfp4": 256, "mx": 512}
"""Family to the columns of a run, which has 16 bytes of scales: a slice of K has a multiple of them."""
_LARGEST = 2**31 - _ROWS
"""Largest extent: coordinates of a box of a tensor map are 32-bit integers."""


def takes(a: Quantized, b: Quantized, family: str) -> bool:
    """Whether the kernels can multiply (M, K) by (N, K). `family`: `native.gemm.operands.product_family`."""
    (m, k), n = a.shape, b.shape[0]
    if family not in RUNS or k < 2 * RUNS[family] or k % RUNS[family] or max(m, n, k) > _LARGEST:
        return False
    return all(takes_operand(q, family) for q in (a, b))


def tokens_of(m: int) -> int:
    """Rows of a of a block of threads."""
    return _TOKENS[0] if m <= _TOKENS[0] else _TOKENS[1]


def slices_of(m: int, n: int, k: int, family: str, multiprocessors: int) -> tuple[int, ...]:
    """First columns of the slices of K: two slices for a block of threads, and as many blocks as `clusters_of` says.

    All slices but the last have equally many columns, and the last has no more."""
    runs, tiles = k // RUNS[family], blocks_for(n, _ROWS) * blocks_for(m, tokens_of(m))
    for blocks in (*clusters_of(tiles, k, multiprocessors), 1):
        starts = range(0, runs, -(-runs // (2 * blocks)))
        if len(starts) == 2 * blocks:
            return tuple(start * RUNS[family] for start in starts)
    raise AssertionError(f"{runs} runs of columns have two slices")


def multiply(product: Product, out: torch.Tensor, *, slices: tuple[int, ...]) -> None:
    """Computes a GEMM into `out` (M, N), for operands that `takes` accepts. `slices` of K: `slices_of`."""
    if out.numel() == 0:
        return
    device, family, tokens = out.device, product.family, tokens_of(product.m)
    cuda, source = device.type == "cuda", f"gemm_fused_{family}"
    refused = torch.zeros(1, dtype=torch.int32, device=device) if family == "mx" else None
    a = dequantize(family, product.a, product.m, product.k, 1, refused, early_kernel=(source, "pack_interleaved"))
    parameters = _PARAMETERS(
        a=a, b_codes=product.b["codes"], b_scales=product.b["scales"], refused=refused,
        **fields_of(product, out, len(slices), _COLUMNS) | {"slice_steps": slices[1] // _COLUMNS},
    )  # fmt: skip
    k = product.k // 2 if family == "nvfp4" else product.k
    cluster = len(slices) // 2 if cuda else 1
    blocks = blocks_for(product.n, _ROWS) * cluster
    launch(
        source, f"gemm_fused_{tokens}", (blocks, blocks_for(product.m, tokens)), (_THREADS,),
        [tensor_map(product.b, product.n, k), parameters, *([product.alpha_parameters()] if refused is None else [])],
        device=device, shared_bytes=_SHARED_BYTES if cuda else 0,  # the CPU build has a static array
        extra_flags=(f"-DSLICES={cluster}",) if cluster > 1 else (), early=True,
    )  # fmt: skip
    if refused is not None:
        multiply_refused(product, out, refused)
