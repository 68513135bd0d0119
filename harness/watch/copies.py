"""Copies of the arguments of a call: on their device before the call, on the host for the judge."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch

from narrowgauge.adapt import tensor
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe

_FAKE = "torch._subclasses.fake_tensor"


def reason_not_to_judge(args: Any, kwargs: Any) -> str:
    """Why the calling thread cannot judge a call with these arguments; empty if it can."""
    cuda: Any = torch.cuda
    if cuda.is_initialized() and cuda.is_current_stream_capturing():
        return "in the capture of a CUDA graph"
    fake = sys.modules[_FAKE].FakeTensor if _FAKE in sys.modules else ()
    if type(torch.empty(0, device="cpu")) is not torch.Tensor:
        return "under a mode without numbers, such as FakeTensorMode"
    found: list[torch.Tensor] = []
    map_tensors((args, kwargs), found.append)
    if any(isinstance(t, fake) or t.device.type == "meta" for t in found):
        return "with tensors without numbers, such as FakeTensor"
    return ""


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with `function(tensor)` for each tensor, also in lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(entry, function) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [map_tensors(entry, function) for entry in value]
        return entries if isinstance(value, list) else tuple(entries)
    return value


def copied(value: Any) -> Any:
    """Arguments with copies of their tensors, on the current stream, without gradient."""
    return map_tensors(value, _clone)


class HostCopy:
    """Arguments of an assertion as data on the host: tensors, numbers, texts, dtypes, lists, tuples and dicts.

    Tensors of a GPU are copied on the current stream into pinned memory; `wait` waits for the copies. Raises TypeError
    for arguments that are no data.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._devices: set[torch.device] = set()
        self._arguments = {name: self._plain(value) for name, value in arguments.items()}
        self._events: list[Any] = []
        cuda: Any = torch.cuda
        for device in self._devices:
            with cuda.device(device):
                event = cuda.Event()
                event.record()
                self._events.append(event)

    def wait(self) -> dict[str, Any]:
        """The arguments, complete."""
        for event in self._events:
            event.synchronize()
        return self._arguments

    def _plain(self, value: Any) -> Any:
        if value is None or isinstance(value, (str, int, float, bool, torch.dtype)):
            return value
        if isinstance(value, Recipe):
            if find_recipe(str(value)) != value:
                raise TypeError(f"the recipe {value} has changed fields, which no name stands for")
            return str(value)
        if isinstance(value, Quantized):
            return {field.name: self._plain(getattr(value, field.name)) for field in fields(value)}
        if isinstance(value, Mapping):
            return {key: self._plain(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            entries = [self._plain(entry) for entry in value]
            return entries if isinstance(value, list) else tuple(entries)
        return self._on_host(tensor(value))

    def _on_host(self, given: torch.Tensor) -> torch.Tensor:
        if given.device.type != "cuda":
            return _clone(given).cpu()
        source = _as_bytes(given.detach())
        self._devices.add(given.device)
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        return target.copy_(source, non_blocking=True).view(given.dtype)


def _clone(given: torch.Tensor) -> torch.Tensor:
    return _as_bytes(given.detach()).clone().view(given.dtype)


def _as_bytes(given: torch.Tensor) -> torch.Tensor:
    """Tensors of pairs of codes as bytes: torch cannot copy their dtype."""
    return given.view(torch.uint8) if given.dtype is torch.float4_e2m1fn_x2 else given
