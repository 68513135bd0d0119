"""Guard zones and poison: what a backend writes where it should not, and does not write where it should.

Tensors that a backend allocates through torch, from Python or C++, get a guard zone before and after, and start out
filled with a poison byte. Its inputs lie between guard zones too. Runs use different poison, so that an element that
nobody wrote, or a read beyond an input, differs between runs. Where the address sanitizer is in the process, it is told
of the zones: a read that changes nothing is found too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.harness.backends.arena import ZONE, Arena, Piece, extent

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
        self._arena = Arena(poison)
        self._inputs: dict[str, torch.Tensor] = {}
        self._pieces: list[Piece] = []
        """Where each of them was laid; none where nothing is guarded."""
        self._before: torch.Tensor | None = None
        """What was in their memory; None where each is that of an input, so that no third copy is kept."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this, torch.compile would step aside, and its function be judged as it runs uncompiled."""
        return True

    def lay(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Copy inputs, which are on one device, to guarded memory there, with their strides.

        What lies between the elements of a view is poison, and watched too.
        """
        self._inputs = dict(inputs)
        if inputs and not _bare.get():
            self._pieces = self._arena.laid(inputs)
            for piece in self._pieces:
                self._forbid(piece, on=True)

    def given(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The inputs that were laid, on a device; a change of them is seen."""
        if not self._pieces:
            return {name: _alike(tensor, device) for name, tensor in self._inputs.items()}
        memory = self._pieces[0].memory
        there = memory.tensor.to(device)
        self._before = None if there is memory.tensor else there.clone()
        memory.tensor = there
        laid = zip(self._inputs.items(), self._pieces, strict=True)
        given = {name: piece.like(tensor) for (name, tensor), piece in laid}
        if self._before is None and any(
            piece.size != t.nbytes for t, piece in zip(given.values(), self._pieces, strict=True)
        ):
            self._before = there.clone()
        return given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func in _EMPTY or func in _FILLED) and not _bare.get():
            like = args[0] if isinstance(args[0], torch.Tensor) else None
            device = torch.device(kwargs.get("device") or ("cpu" if like is None else like.device))
            if device.type != "meta":
                plain = _plain(func, args, kwargs)
                if _guardable(plain) and not kwargs.get("pin_memory"):
                    size = plain.numel() * plain.element_size()
                    piece = self._arena.piece(size, device, f"a tensor of shape {tuple(plain.shape)}")
                    self._forbid(piece, on=True)
                    out = piece.like(plain)
                    return out if func in _EMPTY else out.copy_(func(*args, **kwargs))
        return func(*args, **kwargs)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for piece in self._arena.pieces:
            self._forbid(piece, on=False)

    @staticmethod
    def _forbid(piece: Piece, *, on: bool) -> None:
        """Where the address sanitizer is in this process: any access to the guard zones is a finding of it, or none."""
        marks = _sanitizer()
        memory = piece.memory.tensor
        if marks is None or memory.device.type != "cpu":
            return
        mark = marks[0] if on else marks[1]
        for zone in piece.zones:
            mark(ctypes.c_void_p(memory.data_ptr() + zone.start), ctypes.c_size_t(ZONE))

    def home(self, outputs: Mapping[str, torch.Tensor | None], home: torch.device) -> dict[str, torch.Tensor | None]:
        """Copies of what a run gave, on the device `home`."""
        return {key: None if tensor is None else self._arena.home(tensor, home) for key, tensor in outputs.items()}

    def violations(self) -> tuple[list[str], list[str]]:
        """One sentence for every guard zone that was written, and one for every input that was changed."""
        memory = self._pieces[0].memory.tensor if self._pieces else None
        if memory is not None and self._before is not None and torch.equal(memory, self._before):
            return self._arena.overwritten(intact=memory), []  # one look at all inputs
        changes = {}
        for (name, tensor), piece in zip(self._inputs.items(), self._pieces, strict=bool(self._pieces)):
            before = _memory(tensor) if self._before is None else piece.of(self._before)
            changes[name] = torch.count_nonzero(piece.bytes != before)
        counts = torch.stack(list(changes.values())).tolist() if changes else []  # a GPU is waited for once
        words = [f"{n} bytes of input {name} were changed" for name, n in zip(changes, counts, strict=True) if n]
        return self._arena.overwritten(), words


@cache
def _sanitizer() -> tuple[Any, Any] | None:
    """What forbids and allows memory to the address sanitizer, where this process was started with it."""
    process = ctypes.CDLL(None)
    with suppress(AttributeError):
        return process["__asan_poison_memory_region"], process["__asan_unpoison_memory_region"]
    return None


def _guardable(plain: torch.Tensor) -> bool:
    """Whether its elements lie dense, and are any: torch makes room in an empty tensor that is given as `out`."""
    return plain.layout == torch.strided and 0 < plain.numel() == extent(plain.shape, plain.stride())


def _alike(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy with the same strides and nothing around it."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor without gaps, as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _plain(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """The shape, strides and dtype that a function would give, as itself says; meta tensors hold no memory."""
    return func(*_meta(args), **{**kwargs, "device": "meta"})  # type: ignore[no-any-return]


def _meta(args: tuple[Any, ...]) -> list[Any]:
    return [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]


def unwritten(first: torch.Tensor, second: torch.Tensor, poisons: tuple[int, int]) -> int:
    """How many elements hold the poison of either run in both: nobody wrote them."""
    a, b = (t.contiguous().view(torch.uint8).view(t.numel(), t.element_size()) for t in (first, second))
    return int(((a == poisons[0]).all(1) & (b == poisons[1]).all(1)).sum()) if first.numel() else 0
