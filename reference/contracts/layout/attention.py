"""The softmax of attention in its parts: logits, weights in a narrow dtype, and sums of values with weights.

A kernel subtracts a running maximum m' in place of the maximum m, and holds p' = p·f with f = exp(m − m'). The
factor cancels in the quotient by the sum of the weights. All intervals are intervals of p'/f.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from narrowgauge.reference.contracts import products
from narrowgauge.reference.contracts.casts import nearest
from narrowgauge.reference.contracts.interval import Interval
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.numbers.exact import lowest_bit
from narrowgauge.spec.formats import E4M3, E5M2, Format
from narrowgauge.spec.program import TILE, WEIGHT_DTYPES
from narrowgauge.spec.summation import ACCUMULATOR_BITS, SMALLEST_SUBNORMAL, UNIT

_FAR = -85.0
"""A logit this far below the maximum, in base e, has a weight below 2^-122, and any factor of the weight vanishes."""
_EXPONENTIAL = 5 * UNIT
"""Relative error of expf, exp2f and lg2: 2 ulp, 2.5 ulp from the exact number."""
_POWER = 2.0**-14
"""Distance from an integer, in base 2, up to which a factor counts as a power of two: less than half of the distance
from a power of two to the next tie of float16."""
_LAG = 8 * math.log(2)
"""How far a maximum may lag behind, in base e: FlashAttention-4, flash_attn/cute/softmax.py at 0251105."""
_NO_TOKEN = -(2.0**100)
"""Score of a token outside of a request. Its weight is 0 under a wrong mask too: kernels read no such token."""
_TINY = 2.0**-100
"""Limit of tiny weights: a smaller weight moves a sum by its own size at most, roundings included."""


@dataclass(frozen=True)
class Weight:
    """A dtype of weights."""

    unit: float
    """Half an ulp of 1."""
    smallest: float
    """The smallest weight that is a normal number, the scale of the codes included."""
    dtype: torch.dtype | Format
    power: int = 0
    """Codes are of 2^power·p."""


WEIGHTS = {
    "float32": Weight(2.0**-24, 2.0**-126, torch.float32),
    "bfloat16": Weight(2.0**-8, 2.0**-126, torch.bfloat16),
    "float16": Weight(2.0**-11, 2.0**-14, torch.float16),
    "e4m3": Weight(2.0**-4, 2.0**-14, E4M3, 8),
    "e5m2": Weight(2.0**-3, 2.0**-21, E5M2, 7),
    "e4m3 without a factor": Weight(2.0**-4, 2.0**-6, E4M3),
    "e5m2 without a factor": Weight(2.0**-3, 2.0**-14, E5M2),
}
"""Dtypes of weights by the names of `narrowgauge.spec.program.WEIGHT_DTYPES`, and 8-bit codes of p, which no contract
has."""


Index = Callable[[torch.Tensor, int], torch.Tensor]
OTHER_INDICES: Mapping[str, tuple[str, Index]] = {
    "next": ("the next {}", lambda index, count: (index + 1) % count),
    "previous": ("the {} before", lambda index, count: (index - 1) % count),
    "first": ("{} 0", lambda index, count: index * 0),
    "last": ("the last {}", lambda index, count: index * 0 + count - 1),
    "reversed": ("the {}s in reverse order", lambda index, count: count - 1 - index),
    "modulo": ("the {} i modulo their number for i", lambda index, count: torch.arange(len(index)).to(index) % count),
}
"""Numbers in place of those of an index, with a phrase: from the right ones, and how many there are."""


def other_index(index: torch.Tensor, count: int, to: str | Sequence[int] | None) -> torch.Tensor:
    """An index with other numbers: by a name of `OTHER_INDICES`, or with `to[1]` in place of `to[0]`."""
    if to is None:
        return index
    if isinstance(to, str):
        return OTHER_INDICES[to][1](index, count)
    return torch.where(index == to[0], min(to[1], count - 1), index)


def segments(lengths: torch.Tensor, rows: int, part: str, to: str | Sequence[int] | None = None) -> Interval:
    """The number of the request of each row, or the place of the row in its request: (queries, 1, 1).

    Raises ValueError for lengths that are less than 1 or whose sum is not the number of rows.
    """
    if int(lengths.sum()) != rows or bool((lengths < 1).any()):
        raise ValueError(f"the requests have {lengths.tolist()} rows, and the batch has {rows}")
    request = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    if part == "place":
        first = lengths.cumsum(0) - lengths
        request = torch.arange(len(request), device=lengths.device) - first[request]
    number = other_index(request, len(lengths), to).double().view(-1, 1, 1)
    return Interval(number, number, bits=24)


def shared_heads(q: Interval, lengths: torch.Tensor, rows: int, to: str | Sequence[int] | None = None) -> Interval:
    """The head of the tokens (rows = tokens·heads) of each head of q (queries, q_heads, dim): (q_heads,).

    Raises ValueError if heads do not share equally.
    """
    count, tokens = q.shape[1], int(lengths.sum())
    heads = rows // max(1, tokens)
    if heads * tokens != rows or not heads or count % heads:
        raise ValueError(f"{count} heads of rows do not share {heads} heads of {tokens} tokens equally")
    index = torch.arange(count, device=lengths.device) // (count // heads)
    number = other_index(index, heads, to).double()
    return Interval(number, number, bits=24)


def places(x: Interval) -> Interval:
    """0, 1, … along the last axis."""
    number = torch.arange(x.shape[-1], dtype=torch.float64, device=x.low.device)
    return Interval(number, number, bits=24)


@dataclass(frozen=True)
class _Group:
    """The rows of one request, and G heads of its tokens that H heads of the rows share each."""

    rows: torch.Tensor
    """Places of the rows of the request: (R, 1)."""
    heads: torch.Tensor
    """The heads of the rows: (G, H)."""
    tokens: slice
    """Tokens of the request."""
    head: torch.Tensor
    """The heads of the tokens: (G,)."""

    def of_rows(self, x: Interval) -> Interval:
        """Numbers of the rows and heads: (G, R·H, …)."""
        return x.arranged(lambda t: t[self.rows[:, :, None], self.heads].transpose(0, 1).flatten(1, 2))

    def of_tokens(self, x: Interval, heads: int) -> Interval:
        """Numbers of the tokens (tokens·heads, dim) for each head: (G, S, dim)."""
        return x.arranged(lambda t: t.view(-1, heads, t.shape[1])[self.tokens].movedim(1, 0)[self.head].contiguous())

    def put(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Numbers of the rows and heads (G, R·H, N), in their places of a tensor (queries, q_heads, …)."""
        found = part.view(len(part), len(self.rows), -1, part.shape[-1]).transpose(0, 1).flatten(1, 2)
        whole[self.rows, self.heads.flatten(), : part.shape[-1]] = found


def _groups(
    tokens: Interval, request: torch.Tensor, head: torch.Tensor, lengths: torch.Tensor, *, apart: bool = False
) -> tuple[int, Iterator[_Group]]:
    """Heads of the tokens, and the groups of all requests, `apart` with a head each. Raises ValueError for other tokens
    than the lengths say."""
    if not int(lengths.sum()) or tokens.shape[0] % int(lengths.sum()):
        raise ValueError(f"{tokens.shape[0]} rows of tokens and heads are no heads of {int(lengths.sum())} tokens")
    return tokens.shape[0] // int(lengths.sum()), _each(request, head, lengths, apart)


def _each(request: torch.Tensor, head: torch.Tensor, lengths: torch.Tensor, apart: bool) -> Iterator[_Group]:
    of_head: dict[int, list[int]] = {}
    for place, shared in enumerate(head.tolist()):
        of_head.setdefault(shared, []).append(place)
    alike: dict[tuple[int, int], list[int]] = {}
    for shared, places in of_head.items():
        alike.setdefault((len(places), shared if apart else 0), []).append(shared)
    ends = lengths.cumsum(0).tolist()
    for number in sorted(set(request.tolist())):
        rows = (request == number).nonzero()
        tokens = slice(ends[number] - int(lengths[number]), ends[number])
        for some in alike.values():
            heads = torch.tensor([of_head[shared] for shared in some], device=head.device)
            yield _Group(rows, heads, tokens, torch.tensor(some, device=head.device))


def scores(
    q: Interval,
    k: Interval,
    request: torch.Tensor,
    head: torch.Tensor,
    lengths: torch.Tensor,
    order: str | None = None,
) -> Interval:
    """Σ q·k of known numbers q (queries, q_heads, dim) and k (tokens·heads, dim): (queries, q_heads, keys).

    Bound: `products.product_of_numbers`.
    """
    shape = (*q.shape[:2], int(lengths.max()))
    low, high = (q.low.new_full(shape, _NO_TOKEN) for _ in range(2))
    nan = torch.zeros(shape, dtype=torch.bool, device=q.low.device)
    heads, groups = _groups(k, request, head, lengths, apart=order is not None)
    for group in groups:
        pair = group.of_rows(q), group.of_tokens(k, heads)
        if order is not None:  # of two matrices
            pair = pair[0].arranged(lambda t: t[0]), pair[1].arranged(lambda t: t[0])
        factors = products.factors(pair[0], "float32", None), products.factors(pair[1], "float32", None)
        found = products.product_of_numbers(pair, factors, order, fewest=products.WIDE)
        for whole, part in ((low, found.low), (high, found.high), (nan, found.may_be_nan)):
            group.put(part if order is None else part.unsqueeze(0), whole)
    if torch.equal(low, high):
        high = low
    return Interval(low, high, nan if bool(nan.any()) else None)


def of_tokens(q: Interval, x: Interval, request: torch.Tensor, head: torch.Tensor, lengths: torch.Tensor) -> Interval:
    """Numbers x (tokens·heads, 1) of the tokens of each row and head of q: (queries, q_heads, keys), 0 behind the last
    token."""
    ends = [x.low] if x.point else [x.low, x.high]
    found = [q.low.new_zeros((*q.shape[:2], int(lengths.max()))) for _ in ends]
    heads, groups = _groups(x, request, head, lengths)
    for group in groups:
        for whole, end in zip(found, ends, strict=True):
            own = end.view(-1, heads)[group.tokens].mT[group.head].unsqueeze(1)
            group.put(own.expand(-1, len(group.rows) * group.heads.shape[1], -1), whole)
    return Interval(found[0], found[-1])


def _tiles(d: Interval) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends of the maximum of each tile of d (…, S)."""
    short = -d.shape[-1] % TILE
    low, high = (torch.nn.functional.pad(end, (0, short), value=-math.inf) for end in (d.low, d.high))
    found = [end.view(*end.shape[:-1], -1, TILE).amax(-1) for end in (low, high)]
    return found[0], found[1]


def _widened(p: Interval, relative: torch.Tensor | float, absolute: torch.Tensor | float = 0.0) -> Interval:
    """Weights with a relative and an absolute error; a weight of 0 stays."""
    zero = p.high == 0
    low = (p.low * (1 - relative) - absolute).clamp(min=0.0)
    high = torch.where(zero, 0.0, p.high * (1 + relative) + absolute)
    return Interval(low, high, p.nan)


def rescaled(p: Interval, d: Interval, m: Interval) -> Interval:
    """Weights after rescalings, which have an error each: of exp, of a product, and of the sum that it multiplies.

    A running maximum of tiles grows at most once for each tile whose maximum is below the maximum. Weights of splits
    come from differences of two log-sum-exps, which round, beside the error of the logarithm.
    """
    _, high = _tiles(d)
    grown = ((high < 0) & (high > _FAR)).sum(-1, keepdim=True)
    size = torch.fmax(m.low.abs(), m.high.abs()) + math.log(max(2, d.shape[-1]))
    split = 4 * UNIT * size + 2 * _EXPONENTIAL + 2.0**-22 if d.shape[-1] > TILE else 0.0
    return _widened(p, grown * (_EXPONENTIAL + 4 * UNIT + 4 * UNIT * size) + split)


def weights(p: Interval, d: Interval, to: str) -> Interval:
    """Weights rounded to a dtype, under every factor f that the maximum of some tiles gives. Factors that are powers of
    two change no bit but those of subnormal numbers."""
    if to == "float32":
        return p
    names = [to] if to != "any" else WEIGHT_DTYPES[1:]
    low, high = _tiles(d)
    near = high > _FAR
    powers = [torch.where(near, end, 0.0) / math.log(2) for end in (low, high)]
    whole = powers[1].round()
    odd = ((powers[0] - whole).abs() >= _POWER) | ((powers[1] - whole).abs() >= _POWER)
    # A key is rounded under a maximum that is at most `_LAG` below that of its tile.
    reached = torch.where(odd & near, high, -math.inf).amax(-1, keepdim=True)
    exact = (reached < low - _LAG).repeat_interleave(TILE, -1)[..., : p.shape[-1]]
    ends = []
    for name in names:
        weight = WEIGHTS[name]
        # Below the normal numbers a rounding is one of a step that a factor makes finer.
        step = torch.where(p.low < weight.smallest, 2 * weight.smallest * weight.unit, 0.0)
        of_power, of_any = _widened(_rounded(p, weight), 0.0, step), _widened(p, weight.unit, step)
        ends.append([torch.where(exact, *pair) for pair in ((of_power.low, of_any.low), (of_power.high, of_any.high))])
    lower = torch.stack([pair[0] for pair in ends]).amin(0) if len(ends) > 1 else ends[0][0]
    upper = torch.stack([pair[1] for pair in ends]).amax(0) if len(ends) > 1 else ends[0][1]
    return Interval(lower, lower if torch.equal(lower, upper) else upper, p.nan)


def _rounded(p: Interval, weight: Weight) -> Interval:
    factor = 2.0**weight.power

    def to_dtype(end: torch.Tensor) -> torch.Tensor:
        if isinstance(weight.dtype, torch.dtype):
            return nearest(end, weight.dtype).double()
        code = encode(_to_odd(end * factor), weight.dtype)
        return decode(code, weight.dtype, torch.float64) / factor

    return p.increasing(to_dtype)


def _to_odd(x: torch.Tensor) -> torch.Tensor:
    """`x` (float64) as float32 rounded to odd, so that a further rounding is that of `x`."""
    number = x.float()
    toward = torch.where(number.double() > x, -math.inf, math.inf).float()
    odd = (number.view(torch.int32) & 1) == 1
    return torch.where((number.double() == x) | odd, number, torch.nextafter(number, toward))


def weighted_sum(
    p: Interval, v: Interval, request: torch.Tensor, head: torch.Tensor, lengths: torch.Tensor, *, narrow: bool
) -> Interval:
    """Σ p·v of weights (queries, q_heads, keys) and known numbers v (tokens·heads, v_dim): (queries, q_heads, v_dim).

    Error of the sums: that of `reference.bounds.factor_sums.factor_bounds`, with the largest weights. `narrow`: kernels
    with 8-bit weights add products by 13 fraction bits. Such sums are exact if the rounded weights are known, and if no
    product of a row needs more bits.
    """
    shape = (*p.shape[:2], v.shape[1])
    low, high = (p.low.new_zeros(shape) for _ in range(2))
    heads, groups = _groups(v, request, head, lengths)
    for group in groups:
        tokens = group.of_tokens(v, heads).low
        count = tokens.shape[1]
        if count > p.shape[2]:
            raise ValueError(f"a request has {count} tokens, and {p.shape[2]} weights")
        own = group.of_rows(p).arranged(partial(_first, count))
        for whole, part in zip((low, high), _sums(own, tokens, narrow=narrow), strict=True):
            group.put(part, whole)
    nan = p.may_be_nan.any(-1, keepdim=True).expand(shape)
    if bool(((low == 0) | (high == 0)).any()):  # a sum of 0 has either sign
        low, high = torch.where(low == 0, -0.0, low), torch.where(high == 0, 0.0, high)
    elif torch.equal(low, high):
        high = low
    return Interval(low, high, nan if bool(nan.any()) else None)


def _first(count: int, x: torch.Tensor) -> torch.Tensor:
    return x[..., :count]


def _sums(p: Interval, v: torch.Tensor, *, narrow: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends of the sums of p (G, rows, S) and v (G, S, N): (G, rows, N)."""
    positive, negative, size = v.clamp(min=0), v.clamp(max=0), v.abs()
    low, high = p.low @ positive + p.high @ negative, p.high @ positive + p.low @ negative
    vanishes, columns = p.high < _TINY, lowest_bit(v.mT.contiguous()).unsqueeze(-2)
    whole, tiny = p.high @ size, torch.where(vanishes, p.high, 0.0) @ size
    n = (~vanishes).double() @ (v != 0).double()
    quantum = lowest_bit(torch.where(p.low < _TINY, 0.0, p.low)).unsqueeze(-1) * columns
    exact = (whole <= 2.0**ACCUMULATOR_BITS * quantum) if p.point else torch.zeros_like(low, dtype=torch.bool)
    count = v.shape[-2]
    error = _error(n, whole, 24, 8, count)
    if narrow:
        known = decode(encode(((p.low + p.high) / 2 * 256).float(), E4M3), E4M3, torch.float64) / 256
        known = torch.where(vanishes, 0.0, known)
        inside = ((known >= p.low) & (known <= p.high) | vanishes).all(-1, keepdim=True)
        spread = (p.high - p.low <= 2.0**-8 * p.high) | vanishes
        # `known` has no number below _TINY but 0.
        fits = known @ size <= 2.0**13 * (lowest_bit(known).unsqueeze(-1) * columns)
        safe = inside & spread.all(-1, keepdim=True) & fits
        error = torch.where(safe, error, _error(n, whole, 13, 32, count))
        exact &= safe
    error = torch.where(exact, 0.0, error) + 2 * tiny + count * 2.0**-52 * whole * ~exact
    return low - error, high + error


def _error(n: torch.Tensor, size: torch.Tensor, fraction: int, width: int, columns: int) -> torch.Tensor:
    steps = n.clamp(max=-(-columns // width))
    relative = (n + steps) * 2.0**-fraction + steps * (2.0 ** -min(fraction, 23) + UNIT)
    return relative * size * (1 + 2.0**-10) + n * SMALLEST_SUBNORMAL
