"""Moving arguments and results of a backend's methods between devices: tensors, and containers of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.backends.results import QUANTIZED_PARTS
from narrowgauge.spec.kv_cache import Cache

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
    elif isinstance(value, Cache):
        yield from value.parts().values()
    elif hasattr(value, "codes"):
        yield from tensors_in([getattr(value, name, None) for name in (*QUANTIZED_PARTS, "sizes")])


class KeptResults:
    """The first results of the methods of a case, kept as by a caller."""

    def __init__(self) -> None:
        self.first: dict[str, list[torch.Tensor]] = {}
        """Tensors of the first result, by method."""
        self.reused = False
        """Whether a later result lies in memory of a kept result."""
        self._places: list[tuple[int, int]] = []
        """First and last addresses of the kept tensors."""

    def see(self, method: str, results: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> bool:
        """Compare the memory of a result with the kept results, and keep the result if it is the first of its method.
        True if kept. Memory of the arguments, `given`, belongs to the caller, who may change it."""
        arguments = [
            (start, start + tensor.untyped_storage().nbytes())
            for tensor in given
            if (start := tensor.untyped_storage().data_ptr())
        ]
        places = [place for tensor in results if tensor.numel() and not _overlap(place := _place(tensor), arguments)]
        self.reused = self.reused or any(_overlap(place, self._places) for place in places)
        if method in self.first:
            return False
        self.first[method] = list(results)
        self._places += places
        return True


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte of a tensor, and of the first byte behind it."""
    from narrowgauge.harness.backends.guarded_memory import element_extent

    start = tensor.data_ptr()
    return start, start + element_extent(tensor.shape, tensor.stride()) * tensor.element_size()


def _overlap(place: tuple[int, int], places: Iterable[tuple[int, int]]) -> bool:
    return any(start < place[1] and place[0] < stop for start, stop in places)


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
    """The value with `function` of all its tensors. A quantized operand that is no dataclass becomes a mapping."""
    import torch

    def inner(value: Any) -> Any:
        return map_tensors(value, function)

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: inner(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(inner, value))
    if isinstance(value, Cache) or (is_dataclass(value) and hasattr(value, "codes")):
        members = {f.name: getattr(value, f.name) for f in fields(value)}
        return replace(
            value, **{name: function(member) for name, member in members.items() if isinstance(member, torch.Tensor)}
        )  # type: ignore[type-var]
    if hasattr(value, "codes"):
        return {name: inner(getattr(value, name, None)) for name in QUANTIZED_PARTS}
    return value
