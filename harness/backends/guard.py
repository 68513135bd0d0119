"""Guard zones and poison: detection of writes outside of tensors, and of unwritten outputs.

Tensors that a backend allocates through torch, from Python or C++, get a guard zone before and after, and start out
filled with a poison byte. Inputs lie between guard zones too. Runs use different poison bytes, so an unwritten element,
or a read beyond an input, differs between runs. If the process runs with the address sanitizer, the guard zones are
marked as inaccessible: the sanitizer also finds reads that change no result.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.harness.backends.guarded_memory import ZONE, GuardedMemory, Slot, element_bytes, element_extent

POISON = (0xFF, 0x7B, 0x3C, 0x81)
"""Poison of successive runs: 0xFF is NaN in every floating dtype, 0x7B a large number, which no amax overlooks."""

_aten = torch.ops.aten
_EMPTY_OF_SHAPE = _aten.empty.memory_format
_EMPTY = {
    _EMPTY_OF_SHAPE, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default, _aten.empty_permuted.default,
}  # fmt: skip
_FILLED = {
    _aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default, _aten.ones.default,
    _aten.ones_like.default, _aten.new_ones.default, _aten.full.default, _aten.full_like.default,
    _aten.new_full.default,
}  # fmt: skip
_LIKE = {_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default}
_RESIZED = {_aten.resize_.default, _aten.resize_as_.default}
_CREATING = {id(function): function in _EMPTY for function in (*_EMPTY, *_FILLED)}
"""Functions that allocate, by their ids: the hash of a function is Python code. Value: whether the memory has no values
yet."""

_unguarded: ContextVar[bool] = ContextVar("unguarded", default=False)


@contextmanager
def without_guards() -> Iterator[None]:
    """Disable guards within the context: memory is allocated by torch as usual, for a tool watching every access.

    Such a tool does not report a read of a guard zone, since the zone belongs to the same allocation, nor a read of
    poison, since poison is initialized memory.
    """
    token = _unguarded.set(True)
    try:
        yield
    finally:
        _unguarded.reset(token)


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the context torch allocates guarded memory. `violations` lists overwritten zones and changed inputs."""

    def __init__(self, poison: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = GuardedMemory(poison)
        self._inputs: dict[str, torch.Tensor] = {}
        self._slots: list[Slot] = []
        """Slot of each input, or empty if guards are disabled."""
        self._foreign: list[Slot] = []
        """Slots of inputs in other memory."""
        self._before: torch.Tensor | None = None
        """Memory of the inputs before the run, or None if the input tensors themselves hold these bytes."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: otherwise torch.compile is bypassed, and the function runs uncompiled."""
        return True

    def place_inputs(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Copy inputs of one device to guarded memory on the same device, with their strides.

        The gaps between the elements of a view hold poison and are checked too.
        """
        self._inputs = dict(inputs)
        if inputs and not _unguarded.get():
            self._slots = self._memory.copy_in(inputs)
            for slot in self._slots:
                self._mark_zones(slot, forbid=True)

    def inputs_on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The guarded inputs, on `device`. `violations` detects changes."""
        if not self._slots:
            return {name: _copy_like(tensor, device) for name, tensor in self._inputs.items()}
        memory = self._slots[0].memory
        memory_copy = memory.tensor.to(device)
        self._before = None if memory_copy is memory.tensor else memory_copy.clone()
        memory.tensor = memory_copy
        placed = zip(self._inputs.items(), self._slots, strict=True)
        tensors = {name: slot.like(tensor) for (name, tensor), slot in placed}
        if self._before is None and any(
            slot.size != t.nbytes for t, slot in zip(tensors.values(), self._slots, strict=True)
        ):
            self._before = memory_copy.clone()
        return tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        empty = _CREATING.get(id(func))
        if empty is not None and not _unguarded.get():
            like = args[0] if isinstance(args[0], torch.Tensor) else None
            device = torch.device(kwargs.get("device") or ("cpu" if like is None else like.device))
            if device.type != "meta":
                result = _meta_result(func, args, kwargs)
                if _guardable(result) and not kwargs.get("pin_memory"):
                    size = result.numel() * result.element_size()
                    slot = self._memory.allocate(size, device, f"a tensor of shape {tuple(result.shape)}")
                    self._mark_zones(slot, forbid=True)
                    out = slot.like(result)
                    return out if empty else out.copy_(func(*args, **kwargs))
        # A slot cannot grow. Tensors that `resize_` or a result given as `out` makes larger move to other memory.
        changed = args[:1] if func in _RESIZED else kwargs.values()
        places = [(t, t.shape, t.stride()) for t in changed if isinstance(t, torch.Tensor) and self._memory.slot_of(t)]
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not places or "not resizable" not in str(error):
                raise
            for tensor, shape, stride in places:  # the failed call has changed the shape
                storage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
                tensor.set_(storage, tensor.storage_offset(), shape, stride)
            return func(*args, **kwargs)

    def __enter__(self) -> Guard:
        if "torch._dynamo" in sys.modules:
            _hide_from_compiler()
        for slot in [*self._memory.slots, *self._foreign]:
            self._mark_zones(slot, forbid=True)
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for slot in [*self._memory.slots, *self._foreign]:
            self._mark_zones(slot, forbid=False)

    def forbid_zones(self, slot: Slot) -> None:
        """Forbid access to the guard zones of an input within the context, for the address sanitizer."""
        self._foreign.append(slot)

    @staticmethod
    def _mark_zones(slot: Slot, *, forbid: bool) -> None:
        """Forbid or allow access to the guard zones, if the process runs with the address sanitizer."""
        marks = _sanitizer()
        memory = slot.memory.tensor
        if marks is None or memory.device.type != "cpu":
            return
        mark = marks[0] if forbid else marks[1]
        for zone in slot.zones:
            mark(ctypes.c_void_p(memory.data_ptr() + zone.start), ctypes.c_size_t(ZONE))

    def copy_outputs(self, outputs: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """Copies of the results of a run, on `device`."""
        return {key: self._memory.copy_out(tensor, device) for key, tensor in outputs.items()}

    def place_of(self, tensor: torch.Tensor) -> list[int] | None:
        """Address and size in bytes of the memory between the guard zones of a tensor, or None without guard zones."""
        slot = self._memory.slot_of(tensor)
        return None if slot is None else [slot.memory.tensor.data_ptr() + slot.start, slot.size]

    def violations(self) -> tuple[list[str], list[str]]:
        """Sentences on overwritten guard zones, and sentences on changed inputs."""
        memory = self._slots[0].memory.tensor if self._slots else None
        if memory is not None and self._before is not None and torch.equal(memory, self._before):
            return self._memory.overwritten_zones(intact=memory), []  # one comparison for all inputs
        changes = {}
        for (name, tensor), slot in zip(self._inputs.items(), self._slots, strict=bool(self._slots)):
            before = _dense_bytes(tensor) if self._before is None else slot.bytes_in(self._before)
            changes[name] = torch.count_nonzero(slot.bytes != before)
        counts = torch.stack(list(changes.values())).tolist() if changes else []  # synchronizes once
        sentences = [f"{n} bytes of input {name} were changed" for name, n in zip(changes, counts, strict=True) if n]
        return self._memory.overwritten_zones(), sentences


_dispatch: Any = getattr(Guard.__torch_dispatch__, "__wrapped__", None)
"""The method without torch's wrapper, which keeps torch.compile from tracing it."""


def _dispatch_outside_of_compiler(*args: Any, **options: Any) -> Any:
    """Call the method: without the compiler of torch if no code is compiled, as in most calls. The wrapper of torch
    would import the compiler, for a second, and take as long as the method itself."""
    if get_eval_frame_callback() is None:
        return _dispatch(*args, **options)
    return _uncompiled()(*args, **options)


@cache
def _hide_from_compiler() -> None:
    """Let the compiler of torch run `_dispatch_outside_of_compiler` as it is."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(_dispatch_outside_of_compiler.__code__)


@cache
def _uncompiled() -> Any:
    """The method, which the compiler of torch does not trace."""
    from torch._dynamo import disable

    return disable(_dispatch, wrapping=False)  # type: ignore[no-untyped-call]


if _dispatch is not None:  # the wrapper of a torch without this attribute imports the compiler
    vars(_dispatch)["__dynamo_disable"] = _dispatch_outside_of_compiler


@cache
def _sanitizer() -> tuple[Any, Any] | None:
    """Functions that poison and unpoison memory for the address sanitizer, or None without the sanitizer."""
    process = ctypes.CDLL(None)
    with suppress(AttributeError):
        return process["__asan_poison_memory_region"], process["__asan_unpoison_memory_region"]
    return None


def _guardable(tensor: torch.Tensor) -> bool:
    """Whether the tensor is dense and not empty. torch resizes an empty tensor passed as `out`, so an empty tensor gets
    no guard."""
    return tensor.layout == torch.strided and 0 < tensor.numel() == element_extent(tensor.shape, tensor.stride())


def _copy_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy with the same strides, without guard zones."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def _dense_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether every byte from the first element to the last belongs to one element."""
    return tensor.layout == torch.strided and bool(_aten.is_non_overlapping_and_dense.default(tensor))


def _meta_result(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """The result of a function on the meta device: shape, strides and dtype without memory."""
    if func is _EMPTY_OF_SHAPE and kwargs.keys() <= {"dtype", "device", "pin_memory"}:
        return _empty_form(tuple(args[0]), kwargs.get("dtype") or torch.get_default_dtype())
    if func in _LIKE and kwargs.keys() <= {"dtype", "device", "pin_memory"} and _is_dense(args[0]):
        # torch's own functions import sympy, for 0.3 s in every process
        dtype = kwargs.get("dtype") or args[0].dtype
        return torch.empty_strided(args[0].shape, args[0].stride(), dtype=dtype, device="meta")
    return func(*_meta(args), **{**kwargs, "device": "meta"})  # type: ignore[no-any-return]


@lru_cache(maxsize=1024)
def _empty_form(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _meta(args: tuple[Any, ...]) -> list[Any]:
    return [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]


def unwritten(first: torch.Tensor, second: torch.Tensor, poisons: tuple[int, int]) -> int:
    """Number of elements that hold the poison byte of their run in both runs, so the kernel did not write the
    element."""
    a, b = (element_bytes(t) for t in (first, second))
    return int(((a == poisons[0]).all(1) & (b == poisons[1]).all(1)).sum()) if first.numel() else 0
