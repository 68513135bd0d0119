"""Taking what a door is given, or gives, from one device to another: tensors, and what holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.results import PARTS

if TYPE_CHECKING:
    import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a value: itself, a member, an item, or a part of what is quantized."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "codes"):
        yield from tensors_in([getattr(value, name, None) for name in (*PARTS, "sizes")])


def carried(value: Any, device: torch.device) -> Any:
    """The value with every tensor of it on the device; what is quantized and no dataclass becomes a mapping."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: carried(item, device) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(carried(item, device) for item in value)
    if is_dataclass(value) and hasattr(value, "codes"):
        held = {f.name: getattr(value, f.name) for f in fields(value)}
        return replace(value, **{name: one.to(device) for name, one in held.items() if isinstance(one, torch.Tensor)})  # type: ignore[type-var]
    if hasattr(value, "codes"):
        return {name: carried(getattr(value, name, None), device) for name in PARTS}
    return value
