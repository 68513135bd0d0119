"""Shared memory of a judge and its kernel host: an anonymous file of a CPU, or memory of a GPU opened by CUDA IPC.

A host maps the inputs read-only. The seals of the file refuse a writable mapping and a change of size: no kernel can
change an input of a judge or take the memory away.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from narrowgauge.harness.backends.guarded_memory import copy_elements, tensor_at

CAPACITY = 1 << 34
"""Bytes of a new file. Only touched pages take memory."""
KEPT = 1 << 28
"""Largest number of bytes of a file between cases."""
_SEAL_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of linux/fcntl.h: existing writable mappings stay, and no new mapping is possible."""


def fill(memory: torch.Tensor, start: int, stop: int, byte: int) -> None:
    """Set bytes of shared memory."""
    if memory.device.type == "cpu":  # a call of torch costs ten times as much
        ctypes.memset(memory.data_ptr() + start, byte, stop - start)
    else:
        memory[start:stop].fill_(byte)


def copy_in(
    memory: torch.Tensor, start: int, tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int]
) -> None:
    """Copy a tensor to shared memory, with these strides."""
    if memory.device.type == "cpu" == tensor.device.type and tensor.is_contiguous() and not tensor.is_neg():
        ctypes.memmove(memory.data_ptr() + start, tensor.data_ptr(), tensor.nbytes)
    else:
        copy_elements(tensor, tensor_at(memory, start, tensor.dtype, shape, stride))


class SharedFile:
    """Shared memory of a CPU, on the side of the judge."""

    kind = "cpu"

    def __init__(self, name: str, *, read_only: bool, capacity: int = CAPACITY) -> None:
        """`read_only`: whether the host may only read."""
        self.capacity = capacity
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, capacity)
        self._map = mmap.mmap(self.descriptor, capacity)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        if read_only:
            seals |= _SEAL_FUTURE_WRITE
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)

    @property
    def description(self) -> dict[str, Any]:
        """The memory in a message to the host; its descriptor travels with the message."""
        return {"kind": "cpu", "bytes": self.capacity}

    @property
    def descriptors(self) -> list[int]:
        """File descriptors to send with the description."""
        return [self.descriptor]

    def read(self, start: int, size: int) -> bytes:
        """Bytes of the memory."""
        return self._map[start : start + size]

    def close(self) -> None:
        """Close the file. The mapping ends with the last tensor."""
        os.close(self.descriptor)


class GpuMemory:
    """Shared memory of a GPU, on the side of the judge."""

    kind = "cuda"
    descriptors: tuple[int, ...] = ()

    def __init__(self, capacity: int) -> None:
        """Raises RuntimeError if CUDA IPC is not available."""
        self.capacity = capacity
        self.bytes = torch.empty(capacity, dtype=torch.uint8, device="cuda")
        device, *rest = self.bytes.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        self.description: dict[str, Any] = {
            "kind": "cuda", "bytes": capacity, "device": device,
            "handle": [part.hex() if isinstance(part, bytes) else part for part in rest],
        }  # fmt: skip

    def close(self) -> None:
        """The memory is free when the last tensor ends."""


class Opened:
    """Shared memory, on the side of a host."""

    def __init__(self, description: dict[str, Any], descriptors: list[int], *, read_only: bool) -> None:
        self.kind = description["kind"]
        if self.kind == "cuda":
            handle = [bytes.fromhex(part) if isinstance(part, str) else part for part in description["handle"]]
            storage = torch.UntypedStorage._new_shared_cuda(description["device"], *handle)
            self.bytes = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
            return
        (descriptor,) = descriptors
        access = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
        self._map = mmap.mmap(descriptor, description["bytes"], prot=access)
        os.close(descriptor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns once of a read-only buffer
            self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
