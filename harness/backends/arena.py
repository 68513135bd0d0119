"""Memory between guard zones: many pieces in one allocation, which is poisoned, looked at and copied as one.

Of a GPU each of these is a wait for it, and where several processes share one, for the others too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

ZONE = 4096
"""Bytes of a guard zone."""
CHUNK = {"cpu": 1 << 18}
CHUNK_ELSEWHERE = 1 << 21
"""Bytes of an allocation for several pieces; what would fill half of it has one of its own. Poisoning it takes a CPU
10 µs and a GPU 3 µs, as measured."""
ALIGNMENT = 512
"""Of pieces: that of torch's own allocations on a GPU, a multiple of what kernels ask for."""


@dataclass
class Memory:
    """An allocation, uint8, on a device."""

    tensor: torch.Tensor
    used: int = 0
    """Bytes of it, from the start."""
    copy: torch.Tensor | None = None
    """What was in it after a run, where somebody asked for that (`Arena.home`)."""

    def piece(self, size: int, what: str) -> Piece:
        """The next so many bytes, between zones."""
        start = self.used + ZONE
        self.used += _whole(size)
        return Piece(self, start, size, what)

    @property
    def latest(self) -> torch.Tensor:
        """What is in it: the copy where there is one."""
        return self.tensor if self.copy is None else self.copy


@dataclass
class Piece:
    """A part of an allocation, between two zones."""

    memory: Memory
    start: int
    size: int
    what: str
    """In words."""

    @property
    def zones(self) -> tuple[slice, slice]:
        """Bytes of the allocation: the zone before it, and that behind."""
        end = self.start + self.size
        return slice(self.start - ZONE, self.start), slice(end, end + ZONE)

    @property
    def bytes(self) -> torch.Tensor:
        """What lies between the zones, uint8."""
        return self.of(self.memory.tensor)

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The same bytes of a copy of its allocation."""
        return memory[self.start : self.start + self.size]

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """The piece as a tensor of its own: one that is written in place is no other's version."""
        return placed(self.memory.tensor, self.start, dtype, shape, stride)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece as a tensor like that one."""
        return self.tensor(tensor.dtype, tensor.shape, tensor.stride())


class Arena:
    """All pieces that one run was given, among a poison."""

    def __init__(self, poison: int) -> None:
        self.poison = poison
        self.pieces: list[Piece] = []
        self._open: dict[torch.device, Memory] = {}
        self._at: dict[int, Memory] = {}
        """Allocations for several pieces, by their addresses."""

    def piece(self, size: int, device: torch.device, what: str) -> Piece:
        """So many bytes of poison, between zones."""
        chunk = CHUNK.get(device.type, CHUNK_ELSEWHERE)
        if 2 * _whole(size) > chunk:
            memory = Memory(self._poisoned(_whole(size), device))
        else:
            open_one = self._open.get(device)
            if open_one is None or open_one.used + _whole(size) > chunk:
                open_one = self._open[device] = Memory(self._poisoned(chunk, device))
                self._at[open_one.tensor.data_ptr()] = open_one
            memory = open_one
        self.pieces.append(memory.piece(size, what))
        return self.pieces[-1]

    def _poisoned(self, size: int, device: torch.device) -> torch.Tensor:
        return torch.full((size,), self.poison, dtype=torch.uint8, device=device)

    def laid(self, tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
        """Copies of tensors of one device, with their strides, in one allocation there; poison in their gaps."""
        sizes = [extent(t.shape, t.stride()) * t.element_size() for t in tensors.values()]
        device = next(iter(tensors.values())).device
        memory = Memory(self._poisoned(sum(map(_whole, sizes)), device))
        pieces = [memory.piece(size, f"input {name}") for name, size in zip(tensors, sizes, strict=True)]
        for piece, tensor in zip(pieces, tensors.values(), strict=True):
            piece.like(tensor).copy_(tensor)
        self.pieces += pieces
        return pieces

    def home(self, tensor: torch.Tensor, home: torch.device) -> torch.Tensor:
        """A copy of a tensor that a run gave: of an allocation for several pieces all is copied at once."""
        tensor = tensor.detach()
        memory = self._at.get(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else None
        if memory is None:
            return tensor.to(home, copy=True)
        if memory.copy is None:
            memory.copy = memory.tensor[: memory.used].to(home, copy=True)
        start = int(tensor.storage_offset()) * tensor.element_size()
        return placed(memory.copy, start, tensor.dtype, tensor.shape, tensor.stride())

    def overwritten(self, intact: torch.Tensor | None = None) -> list[str]:
        """One sentence for every zone that was written; none of those in the allocation `intact`."""
        zones: dict[torch.device, list[torch.Tensor]] = {}
        pieces = [piece for piece in self.pieces if piece.memory.tensor is not intact]
        for piece in pieces:
            there = piece.memory.latest
            zones.setdefault(there.device, []).extend(there[zone] for zone in piece.zones)
        # One look at all of them: asking a GPU about each takes a hundred times as long.
        if not any(bool((torch.cat(each) != self.poison).any()) for each in zones.values()):
            return []
        found = []
        for piece in pieces:
            for zone, where in zip(piece.zones, ("before", "behind"), strict=True):
                written = int((piece.memory.latest[zone] != self.poison).sum())
                if written:
                    found.append(f"{written} bytes {where} {piece.what} were written")
        return found


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last in memory."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def _whole(size: int) -> int:
    """Bytes that so many take with their zones."""
    return -(-(ZONE + size + ZONE) // ALIGNMENT) * ALIGNMENT


def placed(
    memory: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor that lies in memory (uint8), from that byte on."""
    made = torch.empty(0, dtype=dtype, device=memory.device)
    offset = memory.storage_offset() + start
    return made.set_(memory.untyped_storage(), offset // dtype.itemsize, tuple(shape), tuple(stride))
