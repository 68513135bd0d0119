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


def with_other_values(p: Interval, kind: str, size: int) -> Interval:
    """Weights (queries, q_heads, keys) as they stand at the values that they multiply, by a rule of `OTHER_VALUES`."""
    keys = p.shape[-1]

    def moved(t: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(t, (0, -keys % (2 * size)))
        pairs = padded.view(*t.shape[:-1], -1, 2, size)
        return OTHER_VALUES[kind](pairs, (keys - 1) // size).reshape(padded.shape)[..., :keys]

    return Interval(moved(p.low), moved(p.high), p.nan)


def _without_tile(pairs: torch.Tensor, last: int) -> torch.Tensor:
    tiles = pairs.flatten(-3, -2).clone()
    tiles[..., last:, :] = 0
    return tiles


def _next_tile(pairs: torch.Tensor, last: int) -> torch.Tensor:
    tiles = pairs.flatten(-3, -2)
    moved = torch.zeros_like(tiles)
    moved[..., 1 : last + 1, :] = tiles[..., :last, :]
    moved[..., last, :] += tiles[..., last, :]
    return moved


OTHER_VALUES: Mapping[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "exchanged": lambda pairs, last: pairs.flip(-2),
    "first": lambda pairs, last: torch.stack([pairs.sum(-2), torch.zeros_like(pairs[..., 0, :])], -2),
    "last-left-out": _without_tile,
    "next": _next_tile,
}
"""Weights in pairs of tiles (…, pairs, 2, size) and the number of the last tile: the values of the two tiles of a pair
are exchanged; both multiply the values of the first; the last tile has no values; each multiplies those of the next."""


def of_lanes(p: Interval, d: Interval, group: int) -> Interval:
    """Weights p = exp(d) relative to the maximum of their half of each `group` keys, times the
    factor of the first half."""
    short = -d.shape[-1] % group
    ends = []
    for end, weight in ((d.high, p.low), (d.low, p.high)):
        halves = torch.nn.functional.pad(end, (0, short), value=-torch.inf).view(*end.shape[:-1], -1, 2, group // 2)
        largest = halves.amax((-3, -1), keepdim=True)
        factor = torch.exp(largest[..., :1, :] - largest).nan_to_num(0.0).expand(halves.shape)
        ends.append(weight * factor.reshape(*end.shape[:-1], -1)[..., : end.shape[-1]])
    return Interval(torch.minimum(*ends), torch.maximum(*ends), p.nan)


def behind_the_end(masked: Interval, scores: Interval, kind: str, size: int) -> Interval:
    """Logits (queries, q_heads, keys) of rows that see keys behind their end: zeros if the request has no such token.

    `masked`: the right logits, −∞ where the mask hides a key. `scores`: the logits before the mask. `kind`: "more" for
    `size` further keys, "tile" for all keys of the last tile of `size`, "zeros" for none, with the last `size` tokens
    of the request read as zeros.
    """
    seen, stored = (masked.low > -torch.inf).sum(-1, keepdim=True), scores.low > _NO_SCORE
    count = stored.sum(-1, keepdim=True)
    end = {"more": seen + size, "tile": -(-seen // size) * size, "zeros": seen}[kind]
    width = max(int(end.max()), scores.shape[-1]) + size * (kind == "zeros")
    place = torch.arange(width, device=seen.device)
    shown = place < end
    if kind == "zeros":  # the zeros stand behind all keys, where no values are
        of_zero = count - size + (place - (width - size))
        shown = (shown & (place < count - size)) | ((place >= width - size) & (of_zero >= 0) & (of_zero < seen))
    keys = torch.nn.functional.pad(stored, (0, width - scores.shape[-1]))

    def padded(t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(t, (0, width - t.shape[-1])).masked_fill(~keys, 0)

    low, high = (padded(end).masked_fill(~shown, -torch.inf) for end in (scores.low, scores.high))
    return Interval(low, high, None if scores.nan is None else padded(scores.nan) & shown)


_NO_SCORE = -(2.0**60)
"""Logits of tokens that a request does not have are smaller."""


def of_first_rows(q: Interval, request: Interval, head: Interval, size: int) -> Interval:
    """q (queries, q_heads, dim) with the rows of the first half of each tile of 2·size rows in both halves.

    The rows of a tile are those of a request, each with the heads that share a head of the cache."""
    queries, q_heads = q.shape[:2]
    order = torch.arange(queries * q_heads, device=q.low.device).view(queries, q_heads)
    source, of_row, of_head = order.clone(), request.low.flatten(), head.low.flatten()
    for number in torch.unique(of_row):
        for shared in torch.unique(of_head):
            rows, heads = (of_row == number).nonzero(), (of_head == shared).nonzero()[:, 0]
            own = order[rows, heads].flatten()
            place = torch.arange(len(own), device=own.device)
            source[rows, heads] = own[torch.where(place % (2 * size) < size, place, place - size)].view(len(rows), -1)
    return q.arranged(lambda t: t.flatten(0, 1)[source.flatten()].view(t.shape))


def regrouped(q: Interval, group: int) -> Interval:
    """q (queries, q_heads, dim) whose heads i·heads + j are in place of the heads j·group + i. Raises ValueError for
    heads that are no multiple of the group."""
    count = q.shape[1]
    if count % group:
        raise ValueError(f"{count} heads are no multiple of {group}")
    return q.arranged(lambda t: t.view(len(t), group, count // group, -1).transpose(1, 2).reshape(t.shape))


CHANGED_ATTENTION: Mapping[str, Callable[..., Interval]] = {
    "left_out": left_out, "of_running": of_running, "averaged": averaged, "with_other_values": with_other_values,
    "of_lanes": of_lanes, "behind_the_end": behind_the_end, "of_first_rows": of_first_rows, "regrouped": regrouped,
}  # fmt: skip
"""Functions of intervals and options by the name of the step."""
