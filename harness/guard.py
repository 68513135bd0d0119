"""Guard zones and poison: what a backend writes where it should not, and does not write where it should.

Tensors that a backend allocates through torch, from Python or C++, get a guard zone before and after, and start out
filled with a poison byte. Its inputs lie between guard zones too. Runs use different poison, so that an element that
nobody wrote, or a read beyond an input, differs between runs. Where the address sanitizer is in the process, it is told
of the zones: a read that changes nothing is found too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ZONE = 4096
"""Bytes of a guard zone; a multiple of every alignment that kernels ask for."""
POISON = (0xFF, 0xA5, 0x3C, 0x81)
"""Poison of successive runs; 0xFF is NaN in every floating dtype."""

_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default, _aten.empty_permuted.default,
}  # fmt: skip
_FILLED = {
    _aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default, _aten.ones.default,
    _aten.ones_like.default, _aten.new_ones.default, _aten.full.default, _aten.full_like.default,
    _aten.new_full.default,
}  # fmt: skip


_bare: ContextVar[bool] = ContextVar("bare", default=False)


@contextmanager
def bare() -> Iterator[None]:
    """Within the context guards guard nothing: memory is as torch allocates it, for a tool that watches every access.

    A read beyond a tensor would meet a guard zone, which is memory of the same allocation; and poison is a value.
    """
    token = _bare.set(True)
    try:
        yield
    finally:
        _bare.reset(token)


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the context, torch allocates guarded memory. `violations()` then says what was overwritten."""

    def __init__(self, poison: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.poison = poison
        self._buffers: list[tuple[torch.Tensor, str]] = []
        self._inputs: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        """Memory of each input, and what was in it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this, torch.compile would step aside, and its function be judged as it runs uncompiled."""
        return True

    def _allocate(self, like: torch.Tensor, device: Any, what: str) -> torch.Tensor:
        """Guarded memory with the shape, strides and dtype of `like`; poison also between its elements."""
        size = _extent(like) * like.dtype.itemsize
        buffer = torch.full((ZONE + size + ZONE,), self.poison, dtype=torch.uint8, device=device)
        self._buffers.append((buffer, what))
        self._forbid(buffer, on=True)
        inside = buffer[ZONE : ZONE + size].view(like.dtype)
        return inside.as_strided(like.shape, like.stride(), inside.storage_offset())

    def guarded(self, tensor: torch.Tensor, name: str, device: torch.device | None = None) -> torch.Tensor:
        """A copy of an input between guard zones, with its strides, remembered so that a change of it is seen.

        What lies between the elements of a view is poison, and remembered too. `device`: where it is to be.
        """
        device = device or tensor.device
        if _bare.get():
            return _alike(tensor, device)
        copy = self._allocate(tensor, device, f"input {name}").copy_(tensor)
        memory = self._buffers[-1][0][ZONE:-ZONE]
        # The memory of a tensor without gaps is that of the original, so no third copy is kept.
        there = tensor.device == copy.device and _extent(tensor) == tensor.numel()
        before = _memory(tensor) if there else memory.clone()
        self._inputs.append((memory, before, name))
        return copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func in _EMPTY or func in _FILLED) and not _bare.get():
            like = args[0] if isinstance(args[0], torch.Tensor) else None
            device = torch.device(kwargs.get("device") or ("cpu" if like is None else like.device))
            if device.type != "meta":
                # The function itself says which shape, strides and dtype it would give; meta tensors hold no memory.
                plain = func(*_meta(args), **{**kwargs, "device": "meta"})
                if _guardable(plain) and not kwargs.get("pin_memory"):
                    out = self._allocate(plain, device, f"a tensor of shape {tuple(plain.shape)}")
                    return out if func in _EMPTY else out.copy_(func(*args, **kwargs))
        return func(*args, **kwargs)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for buffer, _ in self._buffers:
            self._forbid(buffer, on=False)

    @staticmethod
    def _forbid(buffer: torch.Tensor, *, on: bool) -> None:
        """Where the address sanitizer is in this process: any access to the guard zones is a finding of it, or none."""
        marks = _sanitizer()
        if marks is None or buffer.device.type != "cpu":
            return
        mark = marks[0] if on else marks[1]
        for start in (buffer.data_ptr(), buffer.data_ptr() + buffer.numel() - ZONE):
            mark(ctypes.c_void_p(start), ctypes.c_size_t(ZONE))

    def violations(self) -> list[str]:
        """One sentence for every tensor whose guard zone was written and every input that was changed."""
        return self.overwritten() + self.changed()

    def overwritten(self) -> list[str]:
        """One sentence for every guard zone that was written."""
        zones: dict[torch.device, list[torch.Tensor]] = {}
        for buffer, _ in self._buffers:
            zones.setdefault(buffer.device, []).extend((buffer[:ZONE], buffer[-ZONE:]))
        # One look at all of them: asking a GPU about each takes a hundred times as long.
        if not any(bool((torch.cat(each) != self.poison).any()) for each in zones.values()):
            return []
        found = []
        for buffer, what in self._buffers:
            for zone, where in ((buffer[:ZONE], "before"), (buffer[-ZONE:], "behind")):
                written = int((zone != self.poison).sum())
                if written:
                    found.append(f"{written} bytes {where} {what} were written")
        return found

    def changed(self) -> list[str]:
        """One sentence for every input that was changed."""
        found = []
        for memory, before, name in self._inputs:
            if not torch.equal(memory, before):
                found.append(f"{int((memory != before).sum())} bytes of input {name} were changed")
        return found


@cache
def _sanitizer() -> tuple[Any, Any] | None:
    """What forbids and allows memory to the address sanitizer, where this process was started with it."""
    process = ctypes.CDLL(None)
    with suppress(AttributeError):
        return process["__asan_poison_memory_region"], process["__asan_unpoison_memory_region"]
    return None


def _guardable(plain: torch.Tensor) -> bool:
    """Whether its elements lie dense, and are any: torch makes room in an empty tensor that is given as `out`."""
    return plain.layout == torch.strided and 0 < plain.numel() == _extent(plain)


def _alike(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy with the same strides and nothing around it."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last in memory."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor without gaps, as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _meta(args: tuple[Any, ...]) -> list[Any]:
    return [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]


def unwritten(first: torch.Tensor, second: torch.Tensor, poisons: tuple[int, int]) -> int:
    """How many elements hold the poison of either run in both: nobody wrote them."""
    a, b = (t.contiguous().view(torch.uint8).view(t.numel(), t.element_size()) for t in (first, second))
    return int(((a == poisons[0]).all(1) & (b == poisons[1]).all(1)).sum()) if first.numel() else 0
