"""Shared memory of the results of a kernel host. The judge copies the bytes before reading."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.harness.backends.guarded_memory import (
    ALIGNMENT,
    contiguous_strides,
    copy_elements,
    element_extent,
    tensor_at,
)
from narrowgauge.harness.hosts import codec
from narrowgauge.harness.hosts.memory import GpuMemory, SharedFile
from narrowgauge.harness.hosts.remote.inputs import new_memory
from narrowgauge.harness.hosts.remote.transport import Transport, number_of_bytes


class ResultMemory:
    """Memory of the results opened by a host, by its kind."""

    def __init__(self, transport: Transport, name: str) -> None:
        """`name`: of the shared files."""
        self._transport, self._name = transport, name
        self._memory: dict[str, SharedFile | GpuMemory] = {}
        self.touched = 0
        """Largest number of bytes in use since the memory was new."""
        transport.on_end.append(self.free)

    def open(self, kind: str, size: int = 0) -> None:
        """Let the host open memory of a kind for results of `size` bytes."""
        if kind in self._memory and self._memory[kind].capacity >= size:
            return
        memory = new_memory(kind, self._name, size, read_only=False)
        if kind in self._memory:
            self._memory.pop(kind).close()
        self._memory[kind] = memory
        self._transport.send({"op": "results", "memory": memory.description}, memory.descriptors)

    def bytes(self, kind: str, count: int) -> torch.Tensor:
        """The first bytes of the memory of a kind. The host may change them at any time."""
        self.touched = max(self.touched, count)
        return self._memory[kind].bytes[:count]

    def read(self, answer: dict[str, Any], kind: str, limit: int, home: torch.device) -> tuple[Any, torch.Tensor]:
        """The result of an answer on the device `home`, and the bytes of its tensors. `limit`: most bytes of a result.

        Raises ValueError, TypeError or KeyError if the answer holds no result.
        """
        used = number_of_bytes(answer["used"])
        reader = Reader(self.bytes(kind, used), used, limit, home)
        result = codec.decode_result(answer["result"], reader.tensor)
        if len(answer["guarded"]) > reader.tensors:
            raise ValueError(f"guard zones of {len(answer['guarded'])} tensors; the result has {reader.tensors}")
        # A host without a result for the next call does not return this result again.
        self.bytes(kind, used).bitwise_not_()
        settle_copies(kind)
        return result, reader.private

    def free(self) -> None:
        """Free the memory."""
        for memory in self._memory.values():
            memory.close()
        self._memory, self.touched = {}, 0


def settle_copies(kind: str) -> None:
    """Wait until shared memory of a kind has what this process wrote: a host works on a stream of its own."""
    if kind == "cuda":
        torch.cuda.synchronize()


class Reader:
    """Copies the tensors of a result from the shared memory."""

    def __init__(self, memory: torch.Tensor, used: int, limit: int, home: torch.device) -> None:
        """`used`: bytes of the results, as the host says."""
        if used > limit:
            raise ValueError(f"results of {used} bytes; the limit of the case is {limit}")
        # A kernel may write to the shared memory at any time: only this copy reads the memory.
        self.private = memory[:used].clone()
        self._left, self._home = limit, home
        self.tensors = 0
        """Number of tensors so far."""

    def tensor(self, place: Any) -> torch.Tensor:
        """The tensor at a place: first byte, dtype, shape, strides or None. Raises ValueError for a place outside the
        memory, and for strides of another number than the shape. Strides with too much memory are not kept."""
        self.tensors += 1
        start, name, shape, strides = place
        dtype = codec.DTYPES[name]
        if not all(isinstance(n, int) and n >= 0 for n in (start, *shape, *(strides or ()))) or start % ALIGNMENT:
            raise ValueError(f"a tensor of shape {shape} and strides {strides} at byte {start}")
        count = 1
        for extent in shape:
            count *= extent
        size = count * dtype.itemsize
        self._left -= size
        if self._left < 0 or start + size > self.private.numel():
            raise ValueError(f"a tensor of {size} bytes at byte {start} exceeds the results")
        tensor = tensor_at(self.private, start, dtype, shape, contiguous_strides(shape))
        tensor = tensor if tensor.device.type == self._home.type else tensor.to(self._home)
        if strides is None:
            return tensor
        extent = element_extent(shape, strides) * dtype.itemsize
        if extent > self._left:
            return tensor
        self._left -= extent
        plain = tensor.view(torch.uint8) if dtype.itemsize == 1 else tensor  # float4 cannot be copied
        strided = torch.empty_strided(shape, strides, dtype=plain.dtype, device=tensor.device)
        copy_elements(plain, strided)
        return strided.view(dtype)
