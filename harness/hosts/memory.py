"""Memory that a judge shares with its kernel host: an anonymous file of a CPU, or memory of a GPU opened by CUDA IPC.

A host maps the inputs read-only. The seals of the file refuse a writable mapping and a change of size, so that no
kernel can change an input of a judge or take the memory away under it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings
from typing import Any

import torch

CAPACITY = 1 << 34
"""Bytes of a new file. Only touched pages take memory."""
KEPT = 1 << 28
"""Bytes that a file may hold between cases."""
_SEAL_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of linux/fcntl.h: existing writable mappings stay, and no new one is possible."""


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

    def part(self, start: int, size: int) -> torch.Tensor:
        """The bytes from `start` as a tensor with its own storage, for memory of a CPU."""
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=size)
