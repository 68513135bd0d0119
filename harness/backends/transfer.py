"""Moving arguments and results of a backend's methods between devices: tensors, and containers of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.backends.results import QUANTIZED_PARTS

if TYPE_CHECKING:
    import torch

BATCH_BYTES = 1 << 20
"""Largest size in bytes of a tensor moved in a batch: an extra copy takes less time than a synchronization."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a value: the value itself, a member, an item, or a part of a quantized operand."""
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
        yield from tensors_in([getattr(value, name, None) for name in (*QUANTIZED_PARTS, "sizes")])


def to_device(value: Any, device: torch.device) -> Any:
    """The value with all its tensors on `device`. A quantized operand that is no dataclass becomes a mapping."""
    tensors = [tensor for tensor in tensors_in(value) if tensor.device.type != device.type]
    batched = [tensor for tensor in tensors if tensor.is_contiguous() and 0 < tensor.nbytes <= BATCH_BYTES]
    moved = dict(zip(map(id, batched), _move_batch(batched, device), strict=True)) if len(batched) > 1 else {}
    return map_tensors(value, lambda tensor: moved.get(id(tensor), tensor).to(device))


def _move_batch(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies of contiguous tensors on a second device, moved together: every transfer synchronizes the GPU.

    The copies have the alignment of torch's allocations.
    """
    import torch

    from narrowgauge.harness.backends.guarded_memory import ALIGNMENT, tensor_at

    gap = torch.empty(ALIGNMENT, dtype=torch.uint8, device=tensors[0].device)
    parts, starts = [], [0]
    for tensor in tensors:
        parts += [tensor.detach().view(-1).view(torch.uint8), gap[: -tensor.nbytes % ALIGNMENT]]
        starts.append(starts[-1] + parts[-2].nbytes + parts[-1].nbytes)
    moved = torch.cat(parts).to(device)
    return [tensor_at(moved, start, t.dtype, t.shape, t.stride()) for start, t in zip(starts, tensors, strict=False)]


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value with `function` of each of its tensors. A quantized operand that is no dataclass becomes a mapping."""
    import torch

    def inner(value: Any) -> Any:
        return map_tensors(value, function)

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: inner(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(inner, value))
    if is_dataclass(value) and hasattr(value, "codes"):
        members = {f.name: getattr(value, f.name) for f in fields(value)}
        return replace(
            value, **{name: function(member) for name, member in members.items() if isinstance(member, torch.Tensor)}
        )  # type: ignore[type-var]
    if hasattr(value, "codes"):
        return {name: inner(getattr(value, name, None)) for name in QUANTIZED_PARTS}
    return value
