"""Guard zones and poison: what a backend writes where it should not, and does not write where it should.

Tensors that a backend allocates through torch, from Python or C++, get a guard zone before and after, and start out
filled with a poison byte. Its inputs lie between guard zones too. Runs use different poison, so that an element that
nobody wrote, or a read beyond an input, differs between runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ZONE = 4096
"""Bytes of a guard zone; a multiple of every alignment that kernels ask for."""
POISON = (0xFF, 0xA5, 0x3C, 0x81)
"""Poison of successive runs; 0xFF is NaN in every floating dtype."""

_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty.memory_format, _aten.new_empty.default, _aten.zeros.default, _aten.new_zeros.default}
_LIKE = {_aten.empty_like.default, _aten.zeros_like.default}


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the context, torch allocates guarded memory. `violations()` then says what was overwritten."""

    def __init__(self, poison: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.poison = poison
        self._buffers: list[tuple[torch.Tensor, str]] = []
        self._inputs: list[tuple[torch.Tensor, torch.Tensor, str]] = []

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any, what: str) -> torch.Tensor:
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        buffer = torch.full((ZONE + size + ZONE,), self.poison, dtype=torch.uint8, device=device)
        self._buffers.append((buffer, what))
        return buffer[ZONE : ZONE + size].view(dtype).view(shape)

    def guarded(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """A copy of an input between guard zones, remembered so that a change of it is seen."""
        copy = self._allocate(tuple(tensor.shape), tensor.dtype, tensor.device, f"input {name}")
        copy.copy_(tensor)
        self._inputs.append((copy, tensor, name))
        return copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALLOCATIONS or func in _LIKE:
            # The function itself says which shape, dtype and device it would give; meta tensors hold no memory.
            like = args[0] if isinstance(args[0], torch.Tensor) else None
            device = kwargs.get("device") or (torch.device("cpu") if like is None else like.device)
            plain = func(*_meta(args), **{**kwargs, "device": "meta"})
            if plain.is_contiguous() and not kwargs.get("pin_memory"):
                out = self._allocate(tuple(plain.shape), plain.dtype, device, f"a tensor of shape {tuple(plain.shape)}")
                return out.zero_() if "zeros" in func.name() else out
        return func(*args, **kwargs)

    def violations(self) -> list[str]:
        """One sentence for every tensor whose guard zone was written and every input that was changed."""
        found = []
        for buffer, what in self._buffers:
            for zone, where in ((buffer[:ZONE], "before"), (buffer[-ZONE:], "behind")):
                written = int((zone != self.poison).sum())
                if written:
                    found.append(f"{written} bytes {where} {what} were written")
        for copy, original, name in self._inputs:
            if not torch.equal(_bytes(copy), _bytes(original)):
                changed = int((_bytes(copy) != _bytes(original)).sum())
                found.append(f"{changed} bytes of input {name} were changed")
        return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _meta(args: tuple[Any, ...]) -> list[Any]:
    return [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]


def unwritten(first: torch.Tensor, second: torch.Tensor, poisons: tuple[int, int]) -> int:
    """How many elements hold the poison of either run in both: nobody wrote them."""
    a, b = (t.contiguous().view(torch.uint8).view(t.numel(), t.element_size()) for t in (first, second))
    return int(((a == poisons[0]).all(1) & (b == poisons[1]).all(1)).sum()) if first.numel() else 0
