"""Casts of elementwise steps in float32, with one bound of the error for a matrix.

Only few elements lie near a boundary of rounding, and have different numbers in correct kernels. An estimate has a
center per element and bounds for all: a correct kernel holds a number v with |v − c| ≤ relative·|c| + absolute. If both
ends round to the same number, every correct kernel has this number. The remaining elements are in doubt, and `evaluate`
evaluates their intervals. An estimate changes the time of a verdict, never the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowgauge.reference.contracts.functions import function_of
from narrowgauge.reference.contracts.interval import APPROXIMATE_DIVISION, SIGNIFICAND_BITS, Interval
from narrowgauge.spec.program import Program, Step
from narrowgauge.spec.summation import SMALLEST_NORMAL, SMALLEST_SUBNORMAL, UNIT

_LARGE = 2.0**100
"""Elements with a larger magnitude at any step are in doubt: a later step may overflow."""
_SMALL = 2.0**-120
"""A product of nonzero numbers from here on is neither 0 nor subnormal."""
_WIDE = 2.0**-10
"""Relative bounds up to here are added; `_SLACK` covers the terms of higher order, 2^-10 of the bounds."""
_SLACK = 1 + 2.0**-8
_SIGNED = 2.0**-10
_ARGUMENT = 80.0
"""Arguments of exp and exp2 with a larger magnitude are in doubt: float32 may overflow, and e^−x may be subnormal."""
_ULPS = 4
"""Distance of the centers of two formulas for the same number. Elements farther apart are in doubt."""


class Unknown(Exception):
    """Steps without an estimate."""


@dataclass(frozen=True)
class Estimate:
    """Numbers of a matrix, or of its rows or columns: float32 centers, and bounds for all centers."""

    center: torch.Tensor
    relative: float = 0.0
    absolute: float = 0.0
    largest: float = math.inf
    """Upper bound of the magnitudes of centers."""
    smallest: float = 0.0
    """Lower bound of the magnitudes of centers that are not 0; 0: unknown."""
    bits: int = 24
    """Bits of the significands of centers at most, if the centers are exact."""
    zeros: bool = True
    """Whether a center of 0 is this number, with its sign, in every correct kernel."""
    nonzero: bool = False
    """Whether no center is 0."""
    positive: bool = False
    """Whether no center is less than 0."""

    @property
    def exact(self) -> bool:
        """Whether every correct kernel holds the centers."""
        return self.relative == 0 == self.absolute and self.zeros

    @property
    def signed(self) -> bool:
        """Whether every number has the sign of its center, unless the center is 0."""
        return self.absolute <= self.smallest * _SIGNED


Operand = Callable[[int], torch.Tensor | Interval | None]


class Estimator:
    """Estimates of the steps of a contract, for the rows of one slab."""

    def __init__(self, program: Program, leaf: Operand) -> None:
        """`leaf`: the numbers that a step is known to have, the interval of a number for each row or column, or None of
        a step that is estimated from its operands."""
        self._steps, self._flushes, self._leaf = program.steps, program.flushes, leaf
        self._found: dict[int, Any] = {}
        self._masks: list[torch.Tensor] = []
        self._places: list[torch.Tensor] = []

    def cast(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of a cast to 16 bits (M, K), and the elements in doubt: numbers of elements, int64, sorted.

        Raises Unknown for steps without an estimate.
        """
        if self._steps[number].function != "cast" or self._leaf(number) is not None:
            raise Unknown
        result = self._cast(number)
        places = [*self._places, *(_places(mask.expand(result.shape)) for mask in self._masks)]
        if not places:
            return result, torch.zeros(0, dtype=torch.int64, device=result.device)
        return result, places[0] if len(places) == 1 and not self._masks else sorted_places(places)

    def _cast(self, number: int) -> torch.Tensor:
        step = self._steps[number]
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(step.dtype)
        if dtype is None or step.options:
            raise Unknown
        x = self._of(step.operands[0])
        if x.center.dim() != 2 or x.center.shape[-1] == 1:
            raise Unknown
        result, places = rounded(x, dtype)
        if places.numel():
            self._places.append(places)
        half = dtype == torch.float16
        largest = (x.largest + x.absolute) * _SLACK
        smallest = 2.0**-24 if half else x.smallest / 2 if x.signed and x.smallest > _SMALL else 0.0
        known = Estimate(result.float(), 0.0, 0.0, largest, smallest, SIGNIFICAND_BITS[dtype], positive=x.positive)
        self._found[number] = self._bounded(known, torch.finfo(dtype).max if half else _LARGE)
        return result

    def _of(self, number: int) -> Estimate:
        found = self._found.get(number)
        if found is None:
            leaf, step = self._leaf(number), self._steps[number]
            if isinstance(leaf, torch.Tensor):
                found = self._known(leaf)
            elif leaf is not None:
                found = self._interval(leaf)
            elif step.function == "cast":
                self._cast(number)
                return self._of(number)
            elif step.function in _RULES:
                found = self._bounded(_RULES[step.function](self, step))
            else:
                raise Unknown
            self._found[number] = found
        assert isinstance(found, Estimate)
        return found

    # ---- elements in doubt -------------------------------------------------------------------------------------------

    def _without(self, x: Estimate, doubtful: torch.Tensor) -> Estimate:
        """The estimate with 1 in place of centers in doubt."""
        self._masks.append(doubtful)
        center = x.center.masked_fill(doubtful, 1.0)
        return replace(x, center=center, smallest=min(x.smallest, 1.0), largest=max(x.largest, 1.0))

    def _bounded(self, x: Estimate, limit: float = _LARGE) -> Estimate:
        """The estimate without centers beyond `limit`."""
        if not (x.relative <= _WIDE and x.absolute < 2.0**60):
            raise Unknown
        if self._flushes:
            x = self._flushed(x)
        if x.largest <= limit:
            return x
        smallest, largest = _extent(x.center)
        found = replace(x, smallest=smallest, largest=largest)
        if largest <= limit:
            return found
        return replace(self._without(found, ~(x.center.abs() <= limit)), largest=limit)

    def _flushed(self, x: Estimate) -> Estimate:
        """The estimate without centers near 0, and with numbers that are flushed if they are far from their centers."""
        if x.smallest < 1 / _LARGE:
            x = replace(x, smallest=_extent(x.center)[0])
        if x.smallest < 1 / _LARGE:
            x = replace(self._without(x, (x.center != 0) & (x.center.abs() < 1 / _LARGE)), smallest=1 / _LARGE)
        return x if x.zeros and x.signed else replace(x, absolute=x.absolute + SMALLEST_NORMAL)

    def _divisor(self, x: Estimate) -> Estimate:
        """The estimate without centers near 0."""
        if not x.nonzero or x.smallest < 1 / _LARGE:
            smallest = float(x.center.abs().amin())
            if smallest < 1 / _LARGE:
                x = self._without(x, x.center.abs() < 1 / _LARGE)
                smallest = 1 / _LARGE
            x = replace(x, smallest=smallest, nonzero=True)
        beside = x.absolute / x.smallest
        if x.relative + beside > _WIDE:
            raise Unknown
        return replace(x, relative=x.relative + beside * _SLACK, absolute=0.0)

    def _known(self, numbers: torch.Tensor) -> Estimate:
        smallest, largest = _extent(numbers)
        return self._bounded(Estimate(numbers.float(), 0.0, 0.0, largest, smallest, SIGNIFICAND_BITS[numbers.dtype]))

    def _interval(self, x: Interval) -> Estimate:
        center = ((x.low + x.high) / 2).float()
        middle = center.double()
        apart = torch.maximum(x.high - middle, middle - x.low) / middle.abs()
        same = (x.low == x.high) & (x.low == middle) & (x.low.signbit() == x.high.signbit())
        relative = torch.where(same, 0.0, apart)
        doubtful = ~(relative <= _WIDE) | ~(center.abs() <= _LARGE) | x.may_be_nan
        if center.dim() < 2 and bool(doubtful.any()):
            raise Unknown
        center, relative = center.masked_fill(doubtful, 1.0), relative.masked_fill(doubtful, 0.0)
        if bool(doubtful.any()):
            self._masks.append(doubtful)
        smallest, largest = _extent(center)
        bits = 1 if bool(((torch.frexp(center)[0].abs() == 0.5) | (center == 0)).all()) else 24
        return Estimate(
            center, float(relative.amax()) * _SLACK, 0.0, largest, smallest, bits,
            nonzero=bool(center.all()), positive=bool((center >= 0).all()),
        )  # fmt: skip

    # ---- rules -------------------------------------------------------------------------------------------------------

    def _operands(self, step: Step) -> list[Estimate]:
        return [self._of(number) for number in step.operands]

    def same(self, step: Step) -> Estimate:
        """float32 of a 16-bit number."""
        return self._of(step.operands[0])

    def product(self, step: Step) -> Estimate:
        """a·b, or a²."""
        a, b = self._operands(step) * (2 if step.function == "square" else 1)
        smallest = a.smallest * b.smallest * (1 - _WIDE)
        signed = a.zeros and b.zeros and a.signed and b.signed and smallest >= _SMALL
        exact = a.exact and b.exact and a.bits + b.bits <= 24 and signed
        absolute = (a.largest * b.absolute + b.largest * a.absolute + a.absolute * b.absolute) * _SLACK
        return Estimate(
            a.center * b.center,
            0.0 if exact else (a.relative + b.relative + 2 * UNIT) * _SLACK,
            0.0 if exact else absolute + 2 * SMALLEST_SUBNORMAL,
            a.largest * b.largest * _SLACK, smallest, a.bits + b.bits if exact else 24, signed,
            nonzero=a.nonzero and b.nonzero and signed,
            positive=step.function == "square" or (a.positive and b.positive),
        )  # fmt: skip

    def sum(self, step: Step) -> Estimate:
        """a + b, or a − b."""
        a, b = self._operands(step)
        if step.function == "subtract":
            b = replace(b, center=-b.center, positive=False)
        largest = (a.largest + b.largest) * _SLACK
        center = a.center + b.center
        if a.exact and b.exact:
            exact = _adds_exactly(a.center, b.center, center)
            relative = 0.0 if exact else 2 * UNIT * _SLACK
            return Estimate(center, relative, 0.0, largest, positive=a.positive and b.positive)
        relative = 2 * UNIT * _SLACK
        positive = a.positive and b.positive
        if positive or _of_one_sign(a.center, b.center):
            known = [x.smallest for x in (a, b) if x.nonzero]
            return Estimate(
                center, max(a.relative, b.relative) * _SLACK + relative, (a.absolute + b.absolute) * _SLACK, largest,
                max(known, default=min(a.smallest, b.smallest)) * (1 - _WIDE), zeros=a.zeros and b.zeros,
                nonzero=bool(known), positive=positive,
            )  # fmt: skip
        absolute = sum(x.relative * x.largest + x.absolute for x in (a, b)) * _SLACK
        return Estimate(center, relative, absolute, largest, zeros=False)

    def quotient(self, step: Step) -> Estimate:
        """a/b."""
        a, b = self._of(step.operands[0]), self._divisor(self._of(step.operands[1]))
        further = {"quotient": 0.0, "reciprocal": UNIT}.get(step.options.get("form", ""), APPROXIMATE_DIVISION)
        smallest = a.smallest / b.largest * (1 - _WIDE)
        return Estimate(
            a.center / b.center,
            (a.relative + b.relative + 2 * UNIT + further) * _SLACK,
            a.absolute / b.smallest * _SLACK + 2 * SMALLEST_SUBNORMAL,
            a.largest / b.smallest * _SLACK, smallest, zeros=a.zeros and smallest >= _SMALL,
            nonzero=a.nonzero and smallest >= _SMALL, positive=a.positive and b.positive,
        )  # fmt: skip

    def negative(self, step: Step) -> Estimate:
        """−a."""
        a = self._of(step.operands[0])
        return replace(a, center=-a.center, positive=False)

    def magnitude(self, step: Step) -> Estimate:
        """|a|."""
        a = self._of(step.operands[0])
        return replace(a, center=a.center.abs(), positive=True)

    def limited(self, step: Step) -> Estimate:
        """The larger or the smaller of two numbers. Of two zeros a kernel may take either."""
        a, b = self._operands(step)
        larger = step.function == "maximum"
        found = replace(
            _either(a, b, (torch.maximum if larger else torch.minimum)(a.center, b.center)),
            zeros=a.zeros and b.zeros and a.signed and b.signed,
            positive=(a.positive or b.positive) if larger else (a.positive and b.positive),
        )
        if _has_zero(a) and _has_zero(b):
            found = self._without(found, (a.center == 0) & (b.center == 0))
        return found

    def chosen(self, step: Step) -> Estimate:
        """a or b by a comparison of exact numbers."""
        condition = self._steps[step.operands[0]]
        if condition.function != "compare":
            raise Unknown
        x, y = self._operands(condition)
        if not (x.exact and y.exact):
            raise Unknown
        a, b = (self._of(number) for number in step.operands[1:])
        holds = {">": torch.gt, ">=": torch.ge, "<": torch.lt, "<=": torch.le}[condition.options["relation"]]
        return _either(a, b, _selected(holds(x.center, y.center), a.center, b.center))

    def any_of(self, step: Step) -> Estimate:
        """A number by any of several formulas: the center of the first one."""
        first, *others = self._operands(step)
        for other in others:
            a, b = torch.broadcast_tensors(first.center, other.center)  # type: ignore[no-untyped-call]
            apart = a.contiguous().view(torch.int32) - b.contiguous().view(torch.int32)
            least, most = (int(end) for end in apart.aminmax())
            found = _either(first, other, a)
            zeros = found.zeros and found.smallest / 2 >= _SMALL
            relative = found.relative + 2 * _ULPS * UNIT * _SLACK
            absolute = found.absolute + _ULPS * SMALLEST_SUBNORMAL
            first = replace(found, relative=relative, absolute=absolute, smallest=found.smallest / 2, zeros=zeros)
            if least < -_ULPS or most > _ULPS:
                first = self._without(first, (apart < -_ULPS) | (apart > _ULPS))
        return first

    def further(self, step: Step) -> Estimate:
        """A number with further roundings."""
        a, count = self._of(step.operands[0]), step.options["count"]
        relative, smallest = (1 + UNIT) ** count - 1, SMALLEST_NORMAL if self._flushes else SMALLEST_SUBNORMAL
        if len(step.operands) > 1:
            of = self._of(step.operands[1])
            largest = (of.largest * (1 + of.relative) + of.absolute) * relative * _SLACK
            absolute = a.absolute + largest + count * smallest
            return replace(a, absolute=absolute, zeros=False, nonzero=False, positive=False)
        relative, absolute = a.relative + relative * _SLACK, a.absolute + count * smallest
        return replace(a, relative=relative, absolute=absolute, zeros=a.zeros and a.smallest >= _SMALL)

    def function(self, step: Step) -> Estimate:
        """A function of a number, in any of its forms."""
        function, a = function_of(step.function), self._of(step.operands[0])
        exponential = step.function in ("exp", "exp2")
        if exponential and a.largest > _ARGUMENT:
            a = self._bounded(a, _ARGUMENT)
        relative, absolute, inside = 0.0, 0.0, 0.0
        for name in step.options.get("forms") or function.default:
            form = function.forms[name]
            of_result = max((2 * form.ulps + 1) * UNIT, form.relative) + 2 * UNIT * form.ulps_of_argument * a.largest
            relative, inside = max(relative, of_result), max(inside, form.argument)
            absolute = max(absolute, form.absolute + (form.ulps + 1) * SMALLEST_SUBNORMAL)
        center = function.evaluate(a.center.double()).float()
        relative = (relative + 3 * UNIT) * _SLACK
        if exponential:
            moved = math.expm1(min(1.0, ((a.relative + inside) * a.largest + a.absolute) * _SLACK))
            ends = [float(function.evaluate(torch.tensor(end, dtype=torch.float64))) for end in (-a.largest, a.largest)]
            return Estimate(
                center, relative + moved * _SLACK, absolute, ends[1] * _SLACK, ends[0] / 2, nonzero=True, positive=True
            )
        # tanh and erf: slopes are at most 1.13, and concave from 0 on, so a relative error of x is no less than theirs.
        absolute += 1.2 * a.absolute
        zeros = a.zeros and absolute < 2.0**-140
        absolute += SMALLEST_NORMAL if self._flushes else 0.0
        return Estimate(
            center, relative + (a.relative + inside) * _SLACK, absolute, min(1.0, 1.2 * a.largest),
            min(a.smallest, 1.0) / 2, zeros=zeros, nonzero=a.nonzero, positive=a.positive,
        )  # fmt: skip


_RULES: Mapping[str, Callable[[Estimator, Step], Estimate]] = {
    "float32": Estimator.same, "multiply": Estimator.product, "square": Estimator.product, "add": Estimator.sum,
    "subtract": Estimator.sum, "divide": Estimator.quotient, "negative": Estimator.negative,
    "absolute": Estimator.magnitude, "maximum": Estimator.limited, "minimum": Estimator.limited,
    "where": Estimator.chosen, "any_of": Estimator.any_of, "roundings": Estimator.further,
    **dict.fromkeys(("exp", "exp2", "tanh", "erf"), Estimator.function),
}  # fmt: skip
"""Steps with an estimate. Every step gives a number of an element from numbers of this element."""


def rounded(x: Estimate, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of an estimate in a 16-bit dtype, and the elements in doubt: numbers of elements, int64, sorted."""
    center = x.center
    if x.exact:
        return center.to(dtype), torch.zeros(0, dtype=torch.int64, device=center.device)
    smallest = x.smallest
    if x.absolute > smallest * UNIT:
        smallest = _extent(center)[0]
    if x.absolute <= smallest * UNIT:
        slack = x.relative + 5 * UNIT  # of the absolute bound, of both factors, and of both products
        ends = [(center * factor).to(dtype) for factor in (1 - slack, 1 + slack)]
        places = _different(ends[0], ends[1])
        if not x.zeros and _has_zero(x):
            places = sorted_places([places, _places(center == 0)])
        return ends[1], places
    error = center.abs().mul_(x.relative + 5 * UNIT).add_(x.absolute * _SLACK + 2.0**-126)
    ends = [(center - error).to(dtype), (center + error).to(dtype)]
    return ends[1], _different(ends[0], ends[1])


def _selected(mask: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a if the mask holds, else b, by bits: on a CPU a fifth of the time of `torch.where`."""
    one, other = (x.contiguous().view(torch.int32) for x in (a, b))
    return (-mask.int()).bitwise_and_(one ^ other).bitwise_xor_(other).view(torch.float32)


def sorted_places(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Numbers of elements of any part, without duplicates, in order."""
    found: torch.Tensor = torch.cat([*parts]).unique()  # type: ignore[no-untyped-call]
    return found


def _different(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Numbers of the elements with different bits in two tensors of a 16-bit dtype."""
    one, other = a.flatten().view(torch.int16), b.flatten().view(torch.int16)
    if torch.equal(one, other):
        return torch.zeros(0, dtype=torch.int64, device=a.device)
    if one.numel() % 4:
        return (one != other).nonzero()[:, 0]
    # Four elements are compared at once: few of them differ.
    groups = one.view(torch.int64).ne(other.view(torch.int64)).nonzero()
    places = (groups * 4 + torch.arange(4, device=a.device)).flatten()
    return places[one[places] != other[places]]


def _places(mask: torch.Tensor) -> torch.Tensor:
    return mask.flatten().nonzero()[:, 0]


def _of_one_sign(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two numbers have equal signs in every element: their sum does not cancel."""
    return int((a.contiguous().view(torch.int32) ^ b.contiguous().view(torch.int32)).amin()) >= 0


def _adds_exactly(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether every sum of two float32 numbers is exact (Knuth's TwoSum). The first row rules out most."""
    for part in (slice(0, 1), slice(None)):
        one, other, s = (x.expand(total.shape)[part] for x in (a, b, total))
        back = s - one
        error = (one - (s - back)).add_(other - back)
        if float(error.abs_().amax()) != 0:
            return False
    return True


def _either(a: Estimate, b: Estimate, center: torch.Tensor) -> Estimate:
    """An estimate of the numbers of two estimates."""
    return Estimate(
        center, max(a.relative, b.relative), max(a.absolute, b.absolute), max(a.largest, b.largest),
        min(a.smallest, b.smallest), max(a.bits, b.bits), a.zeros and b.zeros, a.nonzero and b.nonzero,
        a.positive and b.positive,
    )  # fmt: skip


def _has_zero(x: Estimate) -> bool:
    return not x.nonzero and float(x.center.abs().amin()) == 0


def _extent(numbers: torch.Tensor) -> tuple[float, float]:
    """The least nonzero magnitude, and the largest magnitude: NaN or infinity if any number is."""
    whole = torch.int16 if numbers.element_size() == 2 else torch.int32
    most = torch.iinfo(whole).max
    size = numbers.contiguous().view(whole) & most
    largest = size.amax()
    smallest = size.sub_(1).bitwise_and_(most).amin()  # 0 becomes the largest integer
    ends = torch.stack([smallest + 1 if int(smallest) < most else largest.new_tensor(most), largest])
    least, greatest = ends.view(numbers.dtype).tolist()
    return (least if math.isfinite(least) else 1.0), greatest
