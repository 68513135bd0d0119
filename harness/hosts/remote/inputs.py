"""Shared memory of the inputs of a kernel host: slots between guard zones, read-only for the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from narrowgauge.harness.backends.guarded_memory import (
    ALIGNMENT,
    ZONE,
    element_bytes,
    element_extent,
    padded_size,
    tensor_at,
)
from narrowgauge.harness.backends.host import Tensors
from narrowgauge.harness.hosts.memory import CAPACITY, GpuMemory, SharedFile, copy_in, fill
from narrowgauge.harness.hosts.remote.transport import Transport

_FAR = 1 << 20
"""Bytes from the begin of a storage to a tensor, from which on the slot does not begin with the storage."""
BEHIND = 1 << 16
"""Bytes of poison behind the guard zones of an input. A kernel that reads on to the end of a tile of 128 rows reads
behind the guard zone. Bytes of a further input or of an earlier case may be the same in every run."""
_PAGE = 1 << 12
_LOOKS = 32
"""Pages of the inputs that are compared with the memory of the host after a case."""
_SMALLEST = 1 << 26
"""Bytes of new shared memory of a GPU."""


def memory_kind(home: torch.device, device: torch.device) -> str:
    """Kind of the shared memory of a host on `device` for tensors of `home`. Without CUDA IPC tensors of a GPU are
    copied to a CPU."""
    return "cuda" if home.type == "cuda" and device.type == "cuda" and gpu_memory_is_shared() else "cpu"


def new_memory(kind: str, name: str, size: int, *, read_only: bool) -> SharedFile | GpuMemory:
    """New memory of a kind. `read_only`: whether the host may only read."""
    if kind == "cuda":
        return GpuMemory(max(size, _SMALLEST))
    return SharedFile(name, read_only=read_only, capacity=max(size, CAPACITY))


class Region:
    """Shared memory with the first `used` bytes in use."""

    def __init__(self, number: int, memory: SharedFile | GpuMemory) -> None:
        self.number, self.memory, self.used = number, memory, 0

    @property
    def room(self) -> int:
        """Number of unused bytes."""
        return self.memory.capacity - self.used


class PlacedSlot(NamedTuple):
    """A part of the shared memory for inputs, between guard zones."""

    region: Region
    number: int
    start: int
    """First byte in the region."""
    size: int
    name: str
    address: int
    """Address of the first byte in this process."""


class InputMemory:
    """Memory of the inputs, opened by a host."""

    def __init__(self, transport: Transport, device: torch.device, name: str) -> None:
        """`name`: of the shared files."""
        self._transport, self._device, self._name = transport, device, name
        self._regions: list[Region] = []
        self._count = 0
        self.touched = 0
        """Largest number of bytes in use since the memory was new."""
        self.pending = 0
        """Prepared runs before their end: their inputs stay in the memory."""
        self.slots: list[PlacedSlot] = []
        """Slots of a call outside of runs, or of the run."""
        transport.on_end.append(self.end)
        transport.input_at = self._place_at

    def end(self) -> None:
        """Free the memory and forget all runs."""
        self.pending = 0
        self.free()

    def free(self) -> None:
        """Free the memory."""
        for region in self._regions:
            region.memory.close()
        self._regions, self.slots, self.touched = [], [], 0

    def reset(self) -> None:
        """Forget all slots, unless a prepared run needs its inputs."""
        if not self.pending:
            self.slots = []
            for region in self._regions:
                region.used = 0

    def _region(self, kind: str, size: int) -> Region:
        """Memory of a kind with room for `size` bytes, opened by the host."""
        for region in self._regions:
            if region.memory.kind == kind and region.room >= size:
                return region
        memory = new_memory(kind, self._name, size, read_only=True)
        self._count += 1
        self._regions.append(Region(self._count, memory))
        self._transport.send(
            {"op": "inputs", "number": self._count, "memory": memory.description}, list(memory.descriptors)
        )
        return self._regions[-1]

    def place(
        self, tensors: Mapping[str, torch.Tensor], poison: int, placed: list[PlacedSlot]
    ) -> tuple[dict[str, Any] | None, Tensors]:
        """Copy tensors of a device into slots of the shared memory, between guard zones. Tensors of a storage share a
        slot, and keep their strides, their offset and their alignment.

        Gives the part of the shared memory for the message, None without elements, and the copies.
        """
        copies = {}
        groups: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors.items():
            if tensor.numel():
                groups.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
            else:
                copies[name] = tensor
        if not groups:
            return None, copies
        extents = {storage: _extent([tensor for _, tensor in group]) for storage, group in groups.items()}
        home = next(iter(groups.values()))[0][1].device
        needed = sum(padded_size(stop - start) + BEHIND for start, stop in extents.values())
        region = self._region(memory_kind(home, self._device), needed)
        start, memory = region.used, region.memory.bytes
        address = memory.data_ptr()
        slots = []
        for storage, group in groups.items():
            base, stop = extents[storage]
            size = stop - base
            names = " and ".join(name for name, _ in group)
            slot = PlacedSlot(region, len(placed), region.used + ZONE, size, names, address + region.used + ZONE)
            end = region.used + padded_size(size) + BEHIND
            if len(group) == 1 and group[0][1].numel() * group[0][1].element_size() == size:
                fill(memory, region.used, slot.start, poison)
                fill(memory, slot.start + size, end, poison)
            else:
                fill(memory, region.used, end, poison)
            for name, tensor in group:
                byte = slot.start + int(tensor.storage_offset()) * tensor.element_size() - base
                copy_in(memory, byte, tensor, tensor.shape, tensor.stride())
                copies[name] = tensor_at(memory, byte, tensor.dtype, tensor.shape, tensor.stride())
            placed.append(slot)
            slots.append([slot.number, slot.start, size, slot.name])
            region.used = end
        self.touched = max(self.touched, region.used)
        if region.memory.kind == "cuda":
            torch.cuda.synchronize()  # the host works on a stream of its own
        span = {"region": region.number, "kind": region.memory.kind, "start": start, "end": region.used, "slots": slots}
        return span, copies

    def check_slots(
        self, span: dict[str, Any], inputs: Tensors, given: Tensors, poison: int
    ) -> tuple[list[str], list[str]]:
        """Sentences on overwritten zones and on changed inputs of a part of the shared memory."""
        outside, changed = [], []
        region = next(region for region in self._regions if region.number == span["region"])
        memory = region.memory.bytes
        zones = [
            (f"{side} input {name}", memory[zone])
            for _, start, size, name in span["slots"]
            for side, zone in (
                ("before", slice(start - ZONE, start)), ("behind", slice(start + size, start + size + ZONE)),
            )
        ]  # fmt: skip
        # A single comparison for all zones: a comparison synchronizes the GPU.
        if bool((torch.cat([zone for _, zone in zones]) != poison).any()):
            for place, zone in zones:
                if written := int((zone != poison).sum()):
                    outside.append(f"{written} bytes {place} were written")
        counts = [_different_bytes(given[name], inputs[name]) for name in inputs if inputs[name].numel()]
        for name, count in zip([n for n in inputs if inputs[n].numel()], torch.stack(counts).tolist(), strict=True):
            changed += [f"{count} bytes of input {name} were changed"] if count else []
        return outside, changed

    def slot(self, tensor: torch.Tensor) -> tuple[PlacedSlot, int] | None:
        """The slot of a tensor in the shared memory, and its first byte in the slot."""
        address = tensor.data_ptr()
        for slot in self.slots:
            byte = address - slot.address
            if 0 <= byte < slot.size:
                return slot, byte
        return None

    def replaced(self, addresses: Mapping[int, int], memory: Callable[[int, int], bytes | None]) -> bool:
        """Whether the host has other memory in place of the inputs of the last case. `addresses`: of the memory by its
        number, as the host says. `memory`: reads the memory of the host. Compares a few bytes of a few pages."""
        for region in self._regions:
            if isinstance(region.memory, SharedFile) and region.number in addresses:
                step = max(_PAGE, region.used // _LOOKS // _PAGE * _PAGE)
                for start in range(0, region.used, step):
                    found = memory(addresses[region.number] + start, ALIGNMENT)
                    if found is not None and found != region.memory.read(start, ALIGNMENT):
                        return True
        return False

    def _place_at(self, offset: Any) -> str:
        """The input at a byte of the memory of a CPU."""
        place = "its inputs"
        for slot in self.slots:
            byte = offset - slot.start if isinstance(offset, int) else -ZONE - 1
            if slot.region.memory.kind == "cpu" and -ZONE <= byte < slot.size + ZONE:
                side = "before" if byte < 0 else "behind"
                inside = 0 <= byte < slot.size
                place = f"{slot.name}, at byte {byte} of {slot.size}" if inside else f"memory {side} {slot.name}"
        return place


def _extent(tensors: list[torch.Tensor]) -> tuple[int, int]:
    """First and last byte of a slot in the storage of its tensors. The slot begins with the storage, or at a multiple
    of the alignment for a tensor far behind the begin."""
    starts = [int(tensor.storage_offset()) * tensor.element_size() for tensor in tensors]
    ends = [
        start + element_extent(tensor.shape, tensor.stride()) * tensor.element_size()
        for start, tensor in zip(starts, tensors, strict=True)
    ]
    first = min(starts)
    return (first // ALIGNMENT * ALIGNMENT if first > _FAR else 0), max(ends)


def _different_bytes(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Number of different bytes, as a tensor."""
    a, b = (element_bytes(tensor) for tensor in (one, other))
    return torch.count_nonzero(a != b)


@cache
def gpu_memory_is_shared() -> bool:
    """Whether CUDA IPC is available. A few containers refuse userfaultfd; then tensors are copied by way of a CPU."""
    try:
        GpuMemory(1)
    except RuntimeError:
        return False
    return True
