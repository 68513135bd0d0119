"""Steps of attention that no contract has and wrong kernels do: keys left out, weights of another maximum, and splits
that are added as if they were equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from narrowgauge.reference.contracts.interval import Interval


def left_out(s: Interval, keys: Sequence[Any]) -> Interval:
    """Logits (queries, q_heads, keys) in which some keys of each row have none: those of a rule of `LEFT_OUT`."""
    seen = s.low > -torch.inf
    place = torch.arange(s.shape[-1], device=s.low.device)
    out = LEFT_OUT[keys[0]](place, seen.sum(-1, keepdim=True), *keys[1:])
    return s.arranged(lambda t: t.masked_fill(out, False if t.dtype == torch.bool else -torch.inf))


def _split(place: torch.Tensor, count: torch.Tensor, splits: int, number: int) -> torch.Tensor:
    size = (count + splits - 1) // splits
    return place // size.clamp(min=1) == number % splits


LEFT_OUT: Mapping[str, Callable[..., torch.Tensor]] = {
    "key": lambda place, count, key: place == key,
    "first": lambda place, count, size: place < size,
    "last": lambda place, count, size: place >= count - size,
    "tile": lambda place, count, size, number: place // size == (number if number >= 0 else (count - 1) // size),
    "border": lambda place, count, size, number: (place > 0) & ((place - number) % size == 0) & (place < count),
    "split": _split,
}  # fmt: skip
"""Keys that a rule leaves out, bool, from the places of the keys and the number of keys that a row sees: a single key;
the first or the last keys; the tile of so many keys with this number, −1 for the last one; the key on one side of the
border of tiles; one of several splits."""


def of_running(p: Interval, d: Interval, tile: int) -> Interval:
    """Weights p = exp(d) relative to the maximum of the tiles up to their own, as they are without rescaling."""
    short = -d.shape[-1] % tile
    ends = []
    for end in (d.low, d.high):
        padded = torch.nn.functional.pad(end, (0, short), value=-torch.inf)
        largest = padded.view(*end.shape[:-1], -1, tile).amax(-1).cummax(-1)[0]
        ends.append(torch.exp(-largest).repeat_interleave(tile, -1)[..., : end.shape[-1]])
    low, high = (
        torch.where(weight == 0, 0.0, weight * end) for weight, end in zip((p.low, p.high), ends[::-1], strict=True)
    )
    return Interval(low, high, p.nan)


def averaged(p: Interval, d: Interval, splits: int) -> Interval:
    """Weights p = exp(d) (queries, q_heads, keys) whose splits have an equal share of the sum each."""
    count = (d.high > -torch.inf).sum(-1, keepdim=True)
    split = torch.arange(d.shape[-1], device=d.low.device) // ((count + splits - 1) // splits).clamp(min=1)
    split = split.clamp(max=splits - 1)
    used = split.where(d.high > -torch.inf, 0).amax(-1, keepdim=True) + 1
    start = d.low.new_full((*d.shape[:-1], splits), -torch.inf)
    most = start.scatter_reduce(-1, split, d.high, "amax").gather(-1, split)
    ends = [torch.exp(end - most).nan_to_num(0.0) for end in (d.low, d.high)]
    sums = [torch.zeros_like(start).scatter_add(-1, split, end).gather(-1, split).clamp(min=1e-300) for end in ends]
    low, high = (end.sum(-1, keepdim=True) / used for end in (p.low, p.high))
    return Interval(ends[0] / sums[1] * low, ends[1] / sums[0] * high, p.nan)


CHANGED_ATTENTION: Mapping[str, Callable[..., Interval]] = {
    "left_out": left_out, "of_running": of_running, "averaged": averaged,
}  # fmt: skip
"""Functions of intervals and options by the name of the step."""
