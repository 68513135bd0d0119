"""Guard zones around inputs and outputs of kernels: docs/tolerance.md#memory-and-repetition."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch

_GUARD = 256  # bytes on either side
_POISON = 0xA5


def embedded(x: torch.Tensor) -> torch.Tensor:
    """`x` between guard zones of 0xFF bytes, which are NaN as floats and as scales: a read outside of `x` shows."""
    buffer = torch.full((x.nbytes + 2 * _GUARD,), 0xFF, dtype=torch.uint8, device=x.device)
    inside = buffer[_GUARD : _GUARD + x.nbytes].view(x.dtype).view(x.shape)
    return inside.copy_(x)


@contextlib.contextmanager
def guarded_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the context, torch allocates outputs between guard zones, which are checked at the end.

    `torch.empty` and `torch.empty_like` give poisoned memory, `torch.zeros` zeros between the zones.
    """
    buffers = []

    def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        buffer = torch.full((size + 2 * _GUARD,), _POISON, dtype=torch.uint8, device=device)
        buffers.append(buffer)
        return buffer[_GUARD : _GUARD + size].view(dtype).view(shape)

    def empty(*shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return guarded(tuple(shape[0]) if isinstance(shape[0], tuple) else shape, dtype, device)

    def zeros(*shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return empty(*shape, dtype=dtype, device=device).zero_()

    def empty_like(x: torch.Tensor) -> torch.Tensor:
        return guarded(tuple(x.shape), x.dtype, x.device)

    with monkeypatch.context() as patch:
        for made in (empty, zeros, empty_like):
            patch.setattr(torch, made.__name__, made)
        yield
    assert buffers, "the kernel's outputs were not made by torch, and nothing was guarded"
    for buffer in buffers:
        assert (buffer[:_GUARD] == _POISON).all(), "something wrote before an output"
        assert (buffer[-_GUARD:] == _POISON).all(), "something wrote behind an output"
