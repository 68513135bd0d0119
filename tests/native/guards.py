"""Poison round what a kernel reads and writes: tolerance.md, rule 5."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch

_GUARD = 256  # bytes on either side
_POISON = 0xA5


def embedded(x: torch.Tensor) -> torch.Tensor:
    """`x` inside a larger buffer of ones, which are NaN as floats and as scales: reading beyond the ends shows."""
    buffer = torch.full((x.nbytes + 2 * _GUARD,), 0xFF, dtype=torch.uint8, device=x.device)
    inside = buffer[_GUARD : _GUARD + x.nbytes].view(x.dtype).view(x.shape)
    return inside.copy_(x)


@contextlib.contextmanager
def guarded_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the context `torch.empty` gives poisoned memory with guards on both sides; they are checked at the end."""
    buffers = []

    def empty(*shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        plain = tuple(shape[0]) if isinstance(shape[0], tuple) else shape
        size = math.prod(plain) * dtype.itemsize
        buffer = torch.full((size + 2 * _GUARD,), _POISON, dtype=torch.uint8, device=device)
        buffers.append(buffer)
        return buffer[_GUARD : _GUARD + size].view(dtype).view(plain)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield
    assert buffers, "the kernel's outputs were not made by torch.empty, and nothing was guarded"
    for buffer in buffers:
        assert (buffer[:_GUARD] == _POISON).all(), "something wrote before an output"
        assert (buffer[-_GUARD:] == _POISON).all(), "something wrote behind an output"
