"""Memory between guard zones: many slots in an allocation, poisoned, checked and copied as a whole.

On a GPU each poisoning, check and copy synchronizes, and delays all processes that share the GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

ZONE = 4096
"""Bytes of a guard zone."""
CHUNK = {"cpu": 1 << 18}
CHUNK_ELSEWHERE = 1 << 21
"""Bytes of an allocation shared by several slots. A slot of half this size or more has its own allocation. Poisoning a
shared allocation takes 10 µs on a CPU and 3 µs on a GPU, measured."""
ALIGNMENT = 512
"""Alignment of slots in bytes: that of torch's allocations on a GPU, a multiple of the alignment kernels require."""

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass
class Allocation:
    """A uint8 allocation on a device."""

    tensor: torch.Tensor
    used: int = 0
    """Bytes used, from the start."""
    copy: torch.Tensor | None = None
    """The contents after a run, if they were copied (`GuardedMemory.copy_out`)."""

    def add_slot(self, size: int, description: str, offset: int = 0) -> Slot:
        """The next `size` bytes, between guard zones, `offset` bytes behind a multiple of `ALIGNMENT`."""
        start = self.used + ZONE + offset
        self.used += padded_size(offset + size)
        return Slot(self, start, size, description, offset)

    @property
    def contents(self) -> torch.Tensor:
        """The copy of the allocation if it exists, else the allocation."""
        return self.tensor if self.copy is None else self.copy


@dataclass
class Slot:
    """Bytes of an allocation between two guard zones."""

    memory: Allocation
    start: int
    size: int
    description: str
    """Name of the slot in messages."""
    offset: int = 0
    """Bytes from the begin of the storage of its tensors to the slot."""

    @property
    def zones(self) -> tuple[slice, slice]:
        """Byte ranges in the allocation: the guard zone before the slot, and the guard zone behind it."""
        end = self.start + self.size
        return slice(self.start - ZONE, self.start), slice(end, end + ZONE)

    @property
    def bytes(self) -> torch.Tensor:
        """The bytes between the guard zones, uint8."""
        return self.bytes_in(self.memory.tensor)

    def bytes_in(self, memory: torch.Tensor) -> torch.Tensor:
        """The bytes of this slot in a copy of its allocation."""
        return memory[self.start : self.start + self.size]

    @property
    def address(self) -> int:
        """Address of the storage of its tensors."""
        return self.memory.tensor.data_ptr() + self.start - self.offset

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """The slot as a tensor with a storage of its own, which cannot grow.

        A kernel may count from the begin of the storage of a tensor that it allocated, and results with one storage
        share memory.
        """
        storage = self.memory.tensor.untyped_storage()[self.start - self.offset : self.start + self.size]
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        return tensor.set_(storage, self.offset // dtype.itemsize, tuple(shape), tuple(stride))

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The slot as a tensor with the dtype, shape and strides of `tensor`."""
        return self.tensor(tensor.dtype, tensor.shape, tensor.stride())


class GuardedMemory:
    """All slots of a run, filled with a poison byte."""

    def __init__(self, poison: int) -> None:
        self.poison = poison
        self.slots: list[Slot] = []
        self._shared: dict[torch.device, Allocation] = {}
        self._shared_slots: dict[int, Slot] = {}
        """Slots of shared allocations by their addresses."""

    def allocate(self, size: int, device: torch.device, description: str) -> Slot:
        """`size` bytes of poison, between guard zones."""
        chunk = CHUNK.get(device.type, CHUNK_ELSEWHERE)
        if 2 * padded_size(size) > chunk:
            slot = Allocation(self._poisoned(padded_size(size), device)).add_slot(size, description)
        else:
            shared = self._shared.get(device)
            if shared is None or shared.used + padded_size(size) > chunk:
                shared = self._shared[device] = Allocation(self._poisoned(chunk, device))
            slot = shared.add_slot(size, description)
            self._shared_slots[slot.address] = slot
        self.slots.append(slot)
        return slot

    def _poisoned(self, size: int, device: torch.device) -> torch.Tensor:
        return torch.full((size,), self.poison, dtype=torch.uint8, device=device)

    def copy_in(self, tensors: Mapping[str, torch.Tensor]) -> list[Slot]:
        """A slot for each tensor of a device, all in a single allocation. The gaps of views hold poison.

        A copy has the strides of its tensor, and as many bytes behind an aligned address as its tensor has behind the
        begin of its storage. Names of one tensor share a slot, as operands of a product that are the same tensor do.
        """
        keys = {
            name: (t.data_ptr() if t.numel() else name, t.dtype, t.shape, t.stride()) for name, t in tensors.items()
        }
        names: dict[tuple[Any, ...], list[str]] = {}
        for name, key in keys.items():
            names.setdefault(key, []).append(name)
        extents = {key: _place(tensors[group[0]]) for key, group in names.items()}
        device = next(iter(tensors.values())).device
        memory = Allocation(self._poisoned(sum(padded_size(sum(extent)) for extent in extents.values()), device))
        slots = {}
        for key, (offset, size) in extents.items():
            slots[key] = memory.add_slot(size, f"input {' and '.join(names[key])}", offset)
            tensor = tensors[names[key][0]]
            copy_elements(tensor, slots[key].like(tensor))
        self.slots += slots.values()
        return [slots[key] for key in keys.values()]

    def copy_out(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy of a result on `device`, with its strides. A shared allocation is copied as a whole, once."""
        tensor = tensor.detach()
        slot = self._shared_slots.get(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else None
        if slot is None and tensor.layout == torch.strided and not tensor.is_contiguous():
            found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            copy_elements(tensor, found)
            return found
        if slot is None:
            return tensor.to(device, copy=True)
        memory = slot.memory
        if memory.copy is None:
            memory.copy = memory.tensor[: memory.used].to(device, copy=True)
        start = slot.start + int(tensor.storage_offset()) * tensor.element_size()
        return tensor_at(memory.copy, start, tensor.dtype, tensor.shape, tensor.stride())

    def slot_of(self, tensor: torch.Tensor) -> Slot | None:
        """The slot that is the storage of a tensor, or None."""
        address = tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
        return next((slot for slot in self.slots if slot.address == address), None)

    def overwritten_zones(self, intact: torch.Tensor | None = None) -> list[str]:
        """A sentence for every overwritten guard zone. Zones of the allocation `intact` are skipped."""
        zones: dict[torch.device, list[torch.Tensor]] = {}
        slots = [slot for slot in self.slots if slot.memory.tensor is not intact]
        overwritten = False
        for slot in slots:
            bytes_now = slot.memory.contents
            if bytes_now.device.type == "cpu":
                overwritten = overwritten or not all(holds_byte(bytes_now, zone, self.poison) for zone in slot.zones)
            else:
                zones.setdefault(bytes_now.device, []).extend(bytes_now[zone] for zone in slot.zones)
        # A single comparison for all zones: a comparison for each zone takes a hundred times as long on a GPU.
        if not overwritten and not any(bool((torch.cat(each) != self.poison).any()) for each in zones.values()):
            return []
        sentences = []
        for slot in slots:
            for zone, side in zip(slot.zones, ("before", "behind"), strict=True):
                written = int((slot.memory.contents[zone] != self.poison).sum())
                if written:
                    sentences.append(f"{written} bytes {side} {slot.description} were written")
        return sentences


def holds_byte(memory: torch.Tensor, zone: slice, byte: int) -> bool:
    """Whether all bytes of a guard zone, in uint8 memory of a CPU, are this byte."""
    return not _libc.memcmp(memory.data_ptr() + zone.start, _zone_of(byte), ZONE)


@cache
def _zone_of(byte: int) -> bytes:
    return bytes([byte]) * ZONE


def element_extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Number of elements from the first to the last element in memory."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes from an aligned address to a tensor, and bytes from its first to its last element."""
    offset = int(tensor.storage_offset()) * tensor.element_size() % ALIGNMENT
    return offset, element_extent(tensor.shape, tensor.stride()) * tensor.element_size()


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return strides[::-1][-len(shape) :] if shape else []


def element_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in order of its elements, uint8 (elements, bytes of an element).

    `contiguous` keeps the strides of extents of 1, such as 0 of an expanded tensor, and `view` of another dtype then
    refuses the tensor.
    """
    dense = (tensor.detach() if tensor.requires_grad else tensor).contiguous()
    count = dense.numel()
    return dense.as_strided((count,), (1,)).view(torch.uint8).view(count, dense.element_size())


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy, with the strides of a new tensor. `contiguous` keeps other strides in extents
    of 1."""
    found = tensor.contiguous()
    return found.as_strided(found.shape, contiguous_strides(found.shape))


def copy_elements(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor to a tensor of equal shape. The elements of an expanded target share memory, and are copied
    once."""
    for axis, (extent, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if extent > 1 and not stride:
            source, target = source.narrow(axis, 0, 1), target.narrow(axis, 0, 1)
    target.copy_(source)


def padded_size(size: int) -> int:
    """Bytes of a slot of `size` bytes with its guard zones, rounded up to `ALIGNMENT`."""
    return -(-(ZONE + size + ZONE) // ALIGNMENT) * ALIGNMENT


def tensor_at(
    memory: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor in uint8 memory whose first element lies at byte `start`."""
    tensor = torch.empty(0, dtype=dtype, device=memory.device)
    offset = memory.storage_offset() + start
    return tensor.set_(memory.untyped_storage(), offset // dtype.itemsize, tuple(shape), tuple(stride))
