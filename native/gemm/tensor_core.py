"""GEMM on the tensor cores of a Hopper GPU: operands are packed as tiles of bfloat16, then multiplied.

`multiply` is told what the portable kernels are: operands, what their rule needs beyond them, and the epilogue: c,
bias, the output, M, N and K, and the types of the three. An MX operand with numbers at the ends of bfloat16's range is
refused by packing; its product is made as those kernels do, by a launch behind that else does nothing, so that nobody
waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from narrowgauge.native.runtime.launch import Argument, launch

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
    *,
    sizes: torch.Tensor | None = None,
) -> None:
    """A product of shape (M, N, K): codes, scales, element and layout of both operands.

    Of sections where there are `sizes` of them: of b then the addresses of all codes and of all scales, and all
    layouts.
    """
    m, n, k = shape
    a, b = operands[:4], operands[4:]
    device = _device(a)
    refused = torch.zeros(1, dtype=torch.int32, device=device) if rule == "mx" else None
    count = 1 if sizes is None else len(sizes)
    grouped, number_of = ("", ()) if sizes is None else ("_grouped", (sizes, np.int32(count)))
    left = pack(rule, a[:3], a[3], m, k, 1, refused, sizes=sizes)
    right = pack(rule, b[:3], b[3], n, k, 2, refused, count=count)
    if rule != "nvfp4":
        each = (np.int32(0),) if sizes is None else ()
        scales = (None, None) if rule == "mx" else (a[1], b[1])
        factors = (scales[0], *each, scales[1], *each, *_TIMES_1)
    shared_bytes = _SHARED_BYTES if device.type == "cuda" else 0  # a CPU's twin has them as an array
    launch(
        SOURCE, f"gemm_tensor{grouped}", (multiprocessors(device),), (_THREADS,),
        (left, right, refused, *number_of, *epilogue, *factors), device=device, shared_bytes=shared_bytes,
    )  # fmt: skip
    if refused is not None:
        grid = (_up(n, _PORTABLE_TILE), _up(m, _PORTABLE_TILE), count)
        arguments = (refused, *number_of[:1], *operands, *epilogue)
        launch(SOURCE, f"gemm{grouped}_mx_refused", grid, (_PORTABLE_THREADS,), arguments, device=device)


def refuses(operand: Sequence[Argument], rows: int, k: int) -> bool:
    """Whether an MX operand (rows, K) is refused. Waits for its device."""
    refused = torch.zeros(1, dtype=torch.int32, device=_device(operand))
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


@cache
def multiprocessors(device: torch.device) -> int:
    """As many blocks of threads as run at a time; on a CPU a few, so that each makes several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _device(operand: Sequence[Argument]) -> torch.device:
    assert isinstance(operand[0], torch.Tensor)
    return operand[0].device


def _up(items: int, each: int) -> int:
    return -(-items // each)
