"""GEMM of FP8 codes by the FP8 tensor cores of a Hopper GPU, by kernels/gemm/sm90/gemm_wgmma_fp8.cu."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from narrowgauge.native.gemm.operands import Fields, Product
from narrowgauge.native.gemm.wgmma import SHARED_BYTES, THREADS, blocks_of, fields_of
from narrowgauge.native.runtime import cuda
from narrowgauge.native.runtime.launch import Argument, launch
from narrowgauge.native.runtime.sources import ToolchainError
from narrowgauge.native.runtime.structs import KernelStruct, StructValue
from narrowgauge.spec.quantized import Quantized

SOURCE = "gemm_wgmma_fp8"
_PARAMETERS = KernelStruct("gemm/sm90/gemm_wgmma_fp8.cuh", "WgmmaFp8Parameters")
_MAP = KernelStruct("gemm/sm90/tile.cuh", "TensorMap")
_BOX = 128
"""Rows, and bytes of a row, of a box of a tensor map."""
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

    Codes have rows of K; with block scales, b has scales of 128×128 elements.
    """
    if family not in ("fp8_tensor", "fp8_block") or (family == "fp8_block" and b.recipe.stored_rows != _BOX):
        return False
    (m, k), n = a.shape, b.shape[0]
    if k == 0 or k % _ALIGNMENT or max(m, n, k) > _LARGEST or max(m, n) * -(-k // _BOX) >= _LARGEST_SCALES:
        return False
    return not any(q.transposed or q.codes.data_ptr() % _ALIGNMENT for q in (a, b))


def multiply(product: Product, out: torch.Tensor, *, slices: int = 1) -> None:
    """Computes a GEMM into `out` (M, N), for operands that `takes` accepts. `slices` of K: `paths.slices_of`."""
    if out.numel() == 0:
        return
    device, tensor = out.device, product.family == "fp8_tensor"
    parameters = _PARAMETERS(a=product.a, b=product.b, **fields_of(product, out, slices, _BOX))
    maps = (tensor_map(product.a, product.m, product.k), tensor_map(product.b, product.n, product.k))
    arguments: list[Argument] = [*maps, parameters, *([product.alpha_parameters()] if tensor else [])]
    on_gpu = device.type == "cuda"
    launch(
        SOURCE, f"gemm_wgmma_fp8_{'tensor' if tensor else 'block'}", (blocks_of(product, slices, device),), (THREADS,),
        arguments, device=device, shared_bytes=SHARED_BYTES if on_gpu else 0,  # the CPU build has a static array
        extra_flags=_flags(product, slices) if on_gpu else (),
    )  # fmt: skip


def _flags(product: Product, slices: int) -> tuple[str, ...]:
    """Compiler flags of the variant of a GEMM on a GPU."""
    return f"-DA_ELEMENT={product.a['element']}", f"-DB_ELEMENT={product.b['element']}", f"-DSLICES={slices}"


def tensor_map(operand: Fields, rows: int, row_bytes: int) -> StructValue:
    """TensorMap of the codes of an operand. `operand`: OperandParameters."""
    codes = operand["codes"]
    assert isinstance(codes, torch.Tensor)
    if codes.device.type == "cuda":
        return _MAP(words=_encoded(codes.data_ptr(), rows, row_bytes))
    return _MAP(words=(codes.data_ptr(), rows, row_bytes, *[0] * (_MAP_WORDS - 3)))


@lru_cache(maxsize=256)  # weights are multiplied again and again
def _encoded(address: int, rows: int, row_bytes: int) -> tuple[int, ...]:
    """Words of a CUtensorMap."""
    # The driver wants an address aligned to 64 bytes.
    buffer = (ctypes.c_uint64 * (2 * _MAP_WORDS))()
    skipped = -ctypes.addressof(buffer) % 64 // 8
    extents, strides = (ctypes.c_uint64 * 2)(row_bytes, rows), (ctypes.c_uint64 * 1)(row_bytes)
    box, steps = (ctypes.c_uint32 * 2)(_BOX, _BOX), (ctypes.c_uint32 * 2)(1, 1)
    error = cuda.library().cuTensorMapEncodeTiled(
        ctypes.byref(buffer, skipped * 8), _UINT8, 2, ctypes.c_void_p(address), extents, strides, box, steps,
        _NO_INTERLEAVE, _SWIZZLE_128B, _L2_256B, _ZEROS_OUTSIDE,
    )  # fmt: skip
    if error:
        raise ToolchainError(
            f"cuTensorMapEncodeTiled of {rows} rows of {row_bytes} bytes returned error {error} of CUresult"
        )
    return tuple(buffer[skipped : skipped + _MAP_WORDS])
