"""GEMM on the tensor cores of a Hopper GPU: operands are packed as tiles of bfloat16, then multiplied.

Both functions are told what the portable kernels are: operands, what their rule needs beyond them, and the epilogue: c,
bias, the output, M, N and K, and the types of the three. An MX operand with numbers at the ends of bfloat16's range is
refused by packing; its product is made as those kernels do, by a launch behind that else does nothing, so that nobody
waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from native.launch import Argument, launch

SOURCE = "gemm_tensor"
_ROWS, _COLUMNS = 128, 64
_TILE_BYTES = _ROWS * _COLUMNS * 2
_PACKING_THREADS, _THREADS = 256, 384
_SHARED_BYTES = 213 * 1024 + 1024
"""sizeof(TensorShared), and what aligns it to 1024 bytes."""
_PORTABLE_TILE = _PORTABLE_THREADS = 64
_KINDS = {"nvfp4": 0, "mx": 1, "fp8_tensor": 2}
"""What the kernels call the scales of a rule."""
_TIMES_1 = (np.int32(1), np.float32(1), np.float32(1))
"""α of two factors alone."""


def multiply(
    rule: str,
    shape: tuple[int, int, int],
    operands: Sequence[Argument],
    factors: Sequence[Argument],
    epilogue: Sequence[Argument],
) -> None:
    """A product of shape (M, N, K): codes, scales, element and layout of both operands."""
    m, n, k = shape
    a, b = operands[:4], operands[4:]
    device = _device(a)
    refused = _refusal(rule, device)
    packed = [pack(rule, a[:3], a[3], m, k, 1, refused), pack(rule, b[:3], b[3], n, k, 2, refused)]
    if rule == "mx":
        factors = (None, np.int32(0), None, np.int32(0), *_TIMES_1)
    elif rule == "fp8_tensor":
        factors = (a[1], np.int32(0), b[1], np.int32(0), *_TIMES_1)
    _launch("gemm_tensor", (*packed, refused, *epilogue, *factors), device)
    if refused is not None:
        grid = (_up(n, _PORTABLE_TILE), _up(m, _PORTABLE_TILE))
        arguments = (refused, *operands, *epilogue)
        launch(SOURCE, "gemm_mx_refused", grid, (_PORTABLE_THREADS,), arguments, device=device)


def multiply_grouped(
    rule: str,
    shape: tuple[int, int, int],
    operands: Sequence[Argument],
    factors: Sequence[Argument],
    epilogue: Sequence[Argument],
) -> None:
    """That of sections: their sizes, a as above, and of b addresses of all codes and of all scales, and all layouts."""
    m, n, k = shape
    sizes, a, b = operands[0], operands[1:5], operands[5:]
    device = _device(operands)
    assert isinstance(sizes, torch.Tensor)
    count = len(sizes)
    refused = _refusal(rule, device)
    left = pack(rule, a[:3], a[3], m, k, 1, refused, sizes=sizes)
    right = pack(rule, b[:3], b[3], n, k, 2, refused, count=count)
    if rule == "mx":
        factors = (None, None, *_TIMES_1)
    elif rule == "fp8_tensor":
        factors = (a[1], b[1], *_TIMES_1)
    _launch("gemm_tensor_grouped", (left, right, refused, sizes, np.int32(count), *epilogue, *factors), device)
    if refused is not None:
        grid = (_up(n, _PORTABLE_TILE), _up(m, _PORTABLE_TILE), count)
        arguments = (refused, *operands, *epilogue)
        launch(SOURCE, "gemm_grouped_mx_refused", grid, (_PORTABLE_THREADS,), arguments, device=device)


def refuses(operand: Sequence[Argument], rows: int, k: int) -> bool:
    """Whether an MX operand (rows, K) is refused. Waits for its device."""
    refused = _refusal("mx", _device(operand))
    assert refused is not None
    pack("mx", operand[:3], operand[3], rows, k, 1, refused)
    return bool(refused)


def pack(
    rule: str,
    operand: Sequence[Argument],
    layout: Argument,
    rows: int,
    k: int,
    multiple: int,
    refused: torch.Tensor | None,
    *,
    sizes: torch.Tensor | None = None,
    count: int = 1,
) -> torch.Tensor:
    """An operand (rows, K) as tiles, of which a multiple lie below each other; or its sections, or `count` matrices.

    `operand`: codes, scales, element; of matrices their addresses, and all layouts.
    """
    layouts = layout if isinstance(layout, torch.Tensor) else None
    sections = 1 if sizes is None else len(sizes)
    # Each section begins with a tile of its own, and its last one may be short.
    tiles = (multiple * _up(rows, multiple * _ROWS) + sections - 1) * _up(k, _COLUMNS)
    device = _device(operand)
    packed = torch.empty(count * tiles * _TILE_BYTES, dtype=torch.uint8, device=device)
    if tiles:
        launch(
            SOURCE, "pack", (tiles, count), (_PACKING_THREADS,),
            (*operand, np.int32(0) if layouts is not None else layout, layouts, np.int64(rows), np.int64(k),
             np.int32(_KINDS[rule]), sizes, np.int32(sections), packed, refused),
            device=device,
        )  # fmt: skip
    return packed


def _refusal(rule: str, device: torch.device) -> torch.Tensor | None:
    """Where packing says that it refuses an operand; None where it never does."""
    return torch.zeros(1, dtype=torch.int32, device=device) if rule == "mx" else None


def _launch(kernel: str, arguments: Sequence[Argument], device: torch.device) -> None:
    grid = (_multiprocessors(device),)
    shared_bytes = _SHARED_BYTES if device.type == "cuda" else 0  # a CPU's twin has them as an array
    launch(SOURCE, kernel, grid, (_THREADS,), arguments, device=device, shared_bytes=shared_bytes)


@cache
def _multiprocessors(device: torch.device) -> int:
    """As many blocks of threads as run at a time; on a CPU a few, so that each makes several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _device(operand: Sequence[Argument]) -> torch.device:
    assert isinstance(operand[0], torch.Tensor)
    return operand[0].device


def _up(items: int, each: int) -> int:
    return -(-items // each)
