"""GEMM and grouped GEMM of codes of 8 bits, FP8 and INT8, by the tensor cores of Hopper.

Kernels: kernels/gemm/sm90/gemm_wgmma_fp8.cu and gemm_wgmma_int8.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from narrowgauge.native.gemm import wgmma
from narrowgauge.native.gemm.operands import Fields, Product, stored
from narrowgauge.native.gemm.paths import columns_of, tiles_of
from narrowgauge.native.runtime import cuda
from narrowgauge.native.runtime.launch import Argument, launch
from narrowgauge.native.runtime.sources import ToolchainError
from narrowgauge.native.runtime.structs import KernelStruct, StructValue
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

SOURCE, INT8_SOURCE = "gemm_wgmma_fp8", "gemm_wgmma_int8"
_PARAMETERS = KernelStruct("gemm/sm90/gemm_wgmma_fp8.cuh", "WgmmaFp8Parameters")
_MAP = KernelStruct("gemm/sm90/tile.cuh", "TensorMap")
_BOX = 128
"""Rows, and bytes of a row, of a box of a tensor map."""
_LOW_BOXES = (32, 64)
"""Rows of a box of a, if a, or a section on average, has no more rows."""
_ALIGNMENT = 16
"""Bytes, of the address and of a row of codes. Source: cuTensorMapEncodeTiled."""
_LARGEST = 2**31 - _BOX
"""Largest extent: coordinates of a box are 32-bit integers."""
_LARGEST_SCALES = 2**32
"""Scales of an operand: the kernels count them by 32-bit integers."""
_MAP_WORDS = 16
_UINT8, _NO_INTERLEAVE, _SWIZZLE_128B, _L2_256B, _ZEROS_OUTSIDE = 0, 0, 3, 3, 0
"""Enumerators of CUtensorMapDataType, …Interleave, …Swizzle, …L2promotion and …FloatOOBfill, cuda.h."""


def takes(a: Quantized, b: Quantized, family: str) -> bool:
    """Whether the kernels can multiply (M, K) by (N, K). `family`: `native.gemm.operands.product_family`.

    Codes have rows of K; with block scales, a has scales of rows, and b of 128×128 elements.
    """
    return not a.transposed and takes_sections(a.codes, a.recipe, [b], family)


def takes_sections(a: torch.Tensor, recipe: Recipe, b: Sequence[Quantized], family: str) -> bool:
    """Whether the kernels can multiply sections with the codes `a` (M, K) of a recipe by matrices `b` (N, K)."""
    rows = recipe.stored_rows, b[0].recipe.stored_rows
    if family not in ("fp8_tensor", "fp8_block") or (family == "fp8_block" and rows != (1, _BOX)):
        return False
    return takes_codes(a, b[0].codes) and not any(q.transposed or q.codes.data_ptr() % _ALIGNMENT for q in b)


def takes_codes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensor maps can have the codes of two operands (M, K) and (N, K)."""
    (m, k), n = a.shape, b.shape[0]
    if k == 0 or k % _ALIGNMENT or max(m, n, k) > _LARGEST or max(m, n) * -(-k // _BOX) >= _LARGEST_SCALES:
        return False
    return not (a.data_ptr() % _ALIGNMENT or b.data_ptr() % _ALIGNMENT)


def multiply(product: Product, out: torch.Tensor, *, slices: int = 1) -> None:
    """Computes a GEMM into `out` (M, N), for operands that `takes` accepts. `slices` of K: `paths.slices_of`."""
    if out.numel() == 0:
        return
    of_rows = product.alpha["a_per_row"] or product.alpha["b_per_row"]
    tensor = "rows" if of_rows else "tensor"
    kernel, alpha = (tensor, [product.alpha_parameters()]) if product.family == "fp8_tensor" else ("block", [])
    maps = tensor_map(product.b, product.n, product.k)
    _launch(f"{SOURCE}_{kernel}", product, out, product.b, maps, alpha, slices=slices)


def multiply_batch(product: Product, out: torch.Tensor, batch: int) -> None:
    """Computes products with scales of rows or tensors into `out` (B, M, N), of operands (B, M, K) and (B, N, K).

    Codes are FP8 or INT8, and `takes_codes` accepts all codes of each operand. K has no slices."""
    if out.numel() == 0:
        return
    kernel = INT8_SOURCE if product.a["element"] == "INT8" else f"{SOURCE}_batch"
    maps = tensor_map(product.b, batch * product.n, product.k)
    _launch(kernel, product, out, product.b, maps, [product.alpha_parameters(), np.int32(batch)], batch=batch)


def multiply_grouped(product: Product, out: torch.Tensor, matrices: Sequence[Fields]) -> None:
    """Computes a grouped GEMM into `out` (M, N), for operands that `takes_sections` accepts. `matrices`:
    OperandParameters of each."""
    sizes, scales = product.sizes, product.b["scales"]
    assert sizes is not None
    assert isinstance(scales, torch.Tensor)
    if out.numel() == 0:
        return
    kernel, scaling = ("tensor", product.alpha_parameters()) if product.family == "fp8_tensor" else ("block", scales)
    b = {**matrices[0], "codes": None, "scales": None}
    maps = tensor_maps(matrices, product.n, product.k, out.device)
    _launch(
        f"{SOURCE}_grouped_{kernel}", product, out, b, maps, [scaling, sizes, product.starts, np.int32(len(matrices))]
    )


def _launch(
    kernel: str,
    product: Product,
    out: torch.Tensor,
    b: Fields,
    maps: StructValue | torch.Tensor,
    further: Sequence[Argument],
    *,
    slices: int = 1,
    batch: int | None = None,
) -> None:
    """`b`: OperandParameters of a matrix. `maps`: its tensor map, or the address of those of all matrices."""
    rows = product.m if product.sizes is None else product.expected_rows // len(product.sizes)
    box_rows = next((low for low in _LOW_BOXES if rows <= low), _BOX)
    parameters = _PARAMETERS(a=product.a, b=b, a_box_rows=box_rows, **wgmma.fields_of(product, out, slices, _BOX))
    device, on_gpu = out.device, out.device.type == "cuda"
    at_once, int8 = wgmma.multiprocessors(device), kernel == INT8_SOURCE
    columns = columns_of(product.m, product.n, slices, at_once)
    if batch is not None and batch * tiles_of(product.m, product.n, _BOX) <= at_once:
        columns = _BOX
    flags: tuple[str, ...] = ("-DTILES_OF_B=1",) if columns == _BOX else ()
    flags += ("-DFEW_ROWS=1",) if box_rows < _BOX and slices == 1 else ()
    if on_gpu and not int8:  # each pair of element formats is compiled separately
        flags += f"-DA_ELEMENT={product.a['element']}", f"-DB_ELEMENT={b['element']}", f"-DSLICES={slices}"
    launch(
        INT8_SOURCE if int8 else SOURCE, kernel, (wgmma.blocks_of(product, slices, device, columns),), (wgmma.THREADS,),
        [tensor_map(product.a, (batch or 1) * product.m, product.k, box_rows), maps, parameters, *further],
        device=device,
        shared_bytes=wgmma.SHARED_BYTES if on_gpu else 0,  # the CPU build has a static array
        extra_flags=flags, early=True,
    )  # fmt: skip


def tensor_map(operand: Fields, rows: int, row_bytes: int, box_rows: int = _BOX) -> StructValue:
    """TensorMap of the codes of an operand. `operand`: OperandParameters."""
    codes = operand["codes"]
    assert isinstance(codes, torch.Tensor)
    if codes.device.type == "cuda":
        return _MAP(words=_encoded(codes.data_ptr(), rows, row_bytes, box_rows))
    return _MAP(words=(codes.data_ptr(), rows, row_bytes, box_rows, *[0] * (_MAP_WORDS - 4)))


def tensor_maps(operands: Sequence[Fields], rows: int, row_bytes: int, device: torch.device) -> torch.Tensor:
    """TensorMap of each operand, in memory of the device."""
    maps = [tensor_map(operand, rows, row_bytes).fields for operand in operands]
    return stored([word for words in maps for word in words if isinstance(word, int)], device)


@lru_cache(maxsize=4096)  # weights are multiplied again and again
def _encoded(address: int, rows: int, row_bytes: int, box_rows: int) -> tuple[int, ...]:
    """Words of a CUtensorMap."""
    # The driver wants an address aligned to 64 bytes.
    buffer = (ctypes.c_uint64 * (2 * _MAP_WORDS))()
    skipped = -ctypes.addressof(buffer) % 64 // 8
    extents, strides = (ctypes.c_uint64 * 2)(row_bytes, rows), (ctypes.c_uint64 * 1)(row_bytes)
    box, steps = (ctypes.c_uint32 * 2)(_BOX, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    error = cuda.library().cuTensorMapEncodeTiled(
        ctypes.byref(buffer, skipped * 8), _UINT8, 2, ctypes.c_void_p(address), extents, strides, box, steps,
        _NO_INTERLEAVE, _SWIZZLE_128B, _L2_256B, _ZEROS_OUTSIDE,
    )  # fmt: skip
    if error:
        raise ToolchainError(
            f"cuTensorMapEncodeTiled of {rows} rows of {row_bytes} bytes returned error {error} of CUresult"
        )
    return tuple(buffer[skipped : skipped + _MAP_WORDS])
