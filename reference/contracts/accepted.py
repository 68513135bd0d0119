"""Accepted results of correct kernels for a tensor: a least and a greatest number or code of every element.

Codes are ordered by their values: −0 lies below 0. A dtype and a format have the same order: a single rule judges
floats, FP8 codes, 4-bit codes and scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, TypeVar

import torch

from narrowgauge.reference.contracts.casts import below, nearest
from narrowgauge.reference.contracts.interval import Interval
from narrowgauge.spec.formats import Format

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.uint8: torch.uint8}
"""Integers of the size of a number."""
PartT = TypeVar("PartT", bound="Part")
_MANY = 16
"""Codes of a format from which an element counts as undetermined, or a quarter of all codes. A float is undetermined if
its interval is wider than this part of the largest magnitude of its row."""


@dataclass(frozen=True)
class Ends:
    """The least and the greatest number of every element in a dtype, float32 ends rounded outward."""

    low: torch.Tensor
    high: torch.Tensor
    """The same object as `low` if all ends are equal."""
    nan: torch.Tensor | None = None
    """Bool: the number may be NaN. None: no number may."""
    places: torch.Tensor | None = None
    """The elements of `uncertain`, if known."""

    @property
    def point(self) -> bool:
        """Whether all ends are equal."""
        return self.low is self.high

    @property
    def never(self) -> torch.Tensor:
        """Bool: only NaN is possible, and both ends are NaN."""
        return self.low.isnan()

    @cached_property
    def uncertain(self) -> torch.Tensor | None:
        """Numbers of the elements with two ends or a possible NaN, int64, in order. None: no element."""
        if self.point and self.nan is None:
            return None
        if self.places is not None:
            return self.places
        bits = BITS[self.low.dtype]
        found = self.low.contiguous().view(bits) != self.high.contiguous().view(bits)
        return (found if self.nan is None else found | self.nan).flatten().nonzero()[:, 0]

    def with_elements(self, places: torch.Tensor, elements: Ends) -> Ends:
        """The ends, replaced by `elements` (N,) at `places`: numbers of elements, int64, in order. `low` changes."""
        apart = different(elements.low, elements.high, None)
        low, high, nan = self.low, self.high, self.nan
        if not self.point or bool(apart.any()):
            high = high.clone()
            high.view(-1)[places] = elements.high
        low.view(-1)[places] = elements.low
        if elements.nan is not None:
            nan = torch.zeros_like(low, dtype=torch.bool) if nan is None else nan.clone()
            nan.view(-1)[places] = elements.nan
            apart |= elements.nan
        return Ends(low, high, nan, places[apart] if self.point and self.nan is None else None)

    def rows(self, some: torch.Tensor) -> Ends:
        """The ends of the rows with these numbers."""
        low = self.low[some]
        return Ends(low, low if self.point else self.high[some], None if self.nan is None else self.nan[some])

    @staticmethod
    def of(x: Interval, dtype: torch.dtype) -> Ends:
        """The ends of an interval of numbers held by the kernel in `dtype`."""
        if x.point:
            low = high = nearest(x.low, dtype, is_float32=True)
        elif dtype == torch.float32:
            low, high = below(x.low), -below(-x.high)
        else:
            low, high = nearest(x.low, dtype), nearest(x.high, dtype)
        return Ends(low, high, None if x.finite else x.may_be_nan)

    @staticmethod
    def joined(parts: Sequence[Ends]) -> Ends:
        """Rows below rows."""
        if len(parts) == 1:
            return parts[0]
        low = torch.cat([part.low for part in parts])
        high = low if all(part.point for part in parts) else torch.cat([part.high for part in parts])
        if all(part.nan is None for part in parts):
            return Ends(low, high)
        return Ends(
            low, high, torch.cat([torch.zeros_like(p.low, dtype=torch.bool) if p.nan is None else p.nan for p in parts])
        )


@dataclass(frozen=True)
class Part:
    """A result of a kernel, and the results of correct kernels. All tensors have the same shape, a code per element."""

    actual: torch.Tensor
    lower: torch.Tensor
    """The least accepted number or code, in the dtype of the result."""
    upper: torch.Tensor
    """The greatest accepted number or code; the same object as `lower` if all elements are determined."""
    wrong: torch.Tensor
    """Bool: the result is not accepted."""
    determined: int
    """Number of elements with a single code in all correct kernels."""
    undetermined: int
    """Number of elements with too many accepted codes for a judgement."""
    fmt: Format | None = None
    """Format of the codes; None for floats."""
    again: Callable[[torch.Tensor, Ends], Part] | None = None
    """Judges the elements with these numbers, int64 (N,), by given ends (N,)."""
    masks: tuple[torch.Tensor, torch.Tensor] | None = None
    """Which elements are determined, and which are undetermined, if they were asked for and are not all determined."""
    place: Callable[[int, int], Mapping[str, int]] | None = None
    """Indices of an element (row, column) in the result of the kernel, by the names of its axes; None: (row,
    column)."""

    @staticmethod
    def joined(parts: Sequence[PartT]) -> PartT:
        """The parts of equal results, rows below rows."""
        first, *others = parts
        if not others:
            return first
        names = ("actual", "lower", "upper", "wrong")
        tensors: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        if all(part.lower is part.upper for part in parts):
            tensors["upper"] = tensors["lower"]
        determined, undetermined = (sum(getattr(p, n) for p in parts) for n in ("determined", "undetermined"))
        return replace(first, **tensors, determined=determined, undetermined=undetermined, again=None)


def judge_range(
    actual: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    nan: torch.Tensor | None = None,
    fmt: Format | None = None,
    *,
    decoded: Format | None = None,
    masks: bool = False,
) -> Part:
    """The part of a result with accepted values between two numbers or codes of its dtype.

    `nan`, bool: NaN is accepted beside the numbers; NaN ends accept NaN alone. NaN equals every NaN. `decoded`: the
    format of the codes, if a float is a multiple of a code: the float is determined as far as its code is. `masks`: the
    part has masks.
    """
    differs = different(actual, lower, fmt)
    if upper is lower and nan is None:
        return Part(actual, lower, upper, differs, actual.numel(), 0, fmt)
    order, low, high = (order_of(x, fmt) for x in (actual, lower, upper))
    is_nan, no_low, no_high = (is_nan_of(x, fmt) for x in (actual, lower, upper))
    empty = no_low & no_high
    allowed = no_low | no_high if nan is None else nan | no_low | no_high
    low, high = torch.where(no_low, high, low), torch.where(no_high, low, high)
    inside = (order >= low) & (order <= high) & ~empty
    wrong = ~torch.where(is_nan, allowed, inside)
    determined = torch.where(allowed, empty, low == high)
    if actual.is_floating_point():
        most = torch.fmax(lower.abs(), upper.abs()).nan_to_num(0.0, 0.0)
        whole = most.dim() < 2 or most.shape[-1] == 1  # a single number per row: compared with the remaining rows
        row = most.amax() if whole and most.numel() else most.amax(-1, keepdim=True) if most.numel() else most
        undetermined = ~((upper.double() - lower.double()) * _MANY <= row) & (lower != upper)
        if decoded is not None:
            factor = 2.0 ** (_few_codes(decoded) / (1 << decoded.mantissa_bits))
            least, most = torch.minimum(lower.abs(), upper.abs()), torch.maximum(lower.abs(), upper.abs())
            undetermined &= ~((lower.sign() == upper.sign()) & (most.double() < factor * least.double()))
    else:
        assert fmt is not None
        undetermined = high - low >= _few_codes(fmt)
    undetermined = undetermined & ~empty | (allowed & ~empty)
    sure, free = (int(mask.count_nonzero()) for mask in (determined, undetermined))
    return Part(actual, lower, upper, wrong, sure, free, fmt, masks=(determined, undetermined) if masks else None)


def _few_codes(fmt: Format) -> int:
    """Number of codes that makes an element undetermined."""
    return min(_MANY, (1 << fmt.bits) // 4)


def different(actual: torch.Tensor, expected: torch.Tensor, fmt: Format | None) -> torch.Tensor:
    """Bool: two results differ in a bit; a NaN equals every NaN."""
    bits = BITS[actual.dtype]
    one, other = actual.contiguous().view(bits), expected.contiguous().view(bits)
    if torch.equal(one, other):  # a tenth of the time of a mask
        return torch.zeros_like(one, dtype=torch.bool)
    differs = one != other
    if bool(differs.any()):
        at = differs.nonzero(as_tuple=True)
        differs[at] = ~(is_nan_of(actual[at], fmt) & is_nan_of(expected[at], fmt))
    return differs


def is_nan_of(values: torch.Tensor, fmt: Format | None) -> torch.Tensor:
    """Bool: a number or a code is NaN."""
    if fmt is None or values.is_floating_point():
        return values.isnan()
    return _table(fmt, str(values.device))[1][values.int()]


def order_of(values: torch.Tensor, fmt: Format | None) -> torch.Tensor:
    """Numbers of floats, or of codes (uint8, a code per byte), in the order of the values: int32. NaN has any
    number."""
    if not values.is_floating_point():
        assert fmt is not None
        return _table(fmt, str(values.device))[0][values.int()]
    bits = values.contiguous().view(BITS[values.dtype])
    return torch.where(bits < 0, ~(bits & torch.iinfo(bits.dtype).max), bits).int()


@cache
def _table(fmt: Format, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of every byte in the order of the values; bool: the byte is NaN."""
    sign = fmt.sign_code if fmt.signed else 256
    negative = range(-sign, 0) if fmt.complement else range(-1, -257, -1)
    order = [code if code < sign else negative[(code - sign) % sign] for code in range(256)]
    nan = [code < fmt.codes and fmt.value(code) != fmt.value(code) for code in range(256)]
    return torch.tensor(order, dtype=torch.int32).to(device), torch.tensor(nan).to(device)
