"""Taking what a door is given, or gives, from one device to another: tensors, and what holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.backends.results import PARTS

if TYPE_CHECKING:
    import torch

TOGETHER = 1 << 20
"""Bytes of a tensor up to which it is brought together with others: copying it once more takes less than a wait."""


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
    tensors = [tensor for tensor in tensors_in(value) if tensor.device.type != device.type]
    few = [tensor for tensor in tensors if tensor.is_contiguous() and 0 < tensor.nbytes <= TOGETHER]
    moved = dict(zip(map(id, few), _together(few, device), strict=True)) if len(few) > 1 else {}
    return _carried(value, device, moved)


def _together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies of contiguous tensors of one device on another one, brought there at once: each time a GPU is waited for.

    They are as aligned as torch's own.
    """
    import torch

    from narrowgauge.harness.backends.arena import ALIGNMENT, placed

    gap = torch.empty(ALIGNMENT, dtype=torch.uint8, device=tensors[0].device)
    parts, starts = [], [0]
    for tensor in tensors:
        parts += [tensor.detach().view(-1).view(torch.uint8), gap[: -tensor.nbytes % ALIGNMENT]]
        starts.append(starts[-1] + parts[-2].nbytes + parts[-1].nbytes)
    there = torch.cat(parts).to(device)
    return [placed(there, start, t.dtype, t.shape, t.stride()) for start, t in zip(starts, tensors, strict=False)]


def _carried(value: Any, device: torch.device, moved: Mapping[int, torch.Tensor]) -> Any:
    """`carried`, with the tensors that are there already, by the identity of those that they are copies of."""
    import torch

    def bring(value: Any) -> Any:
        return _carried(value, device, moved)

    if isinstance(value, torch.Tensor):
        return moved.get(id(value), value).to(device)
    if isinstance(value, Mapping):
        return {name: bring(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(bring, value))
    if is_dataclass(value) and hasattr(value, "codes"):
        held = {f.name: getattr(value, f.name) for f in fields(value)}
        return replace(value, **{name: bring(one) for name, one in held.items() if isinstance(one, torch.Tensor)})  # type: ignore[type-var]
    if hasattr(value, "codes"):
        return {name: bring(getattr(value, name, None)) for name in PARTS}
    return value
