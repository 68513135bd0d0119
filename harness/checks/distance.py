"""How far wrong elements are from what is expected, in words.

A distance of a few neighbouring numbers is a count of steps. From `RELATIVE_FROM` steps on, it is a relative
difference: a count like 202 831 874 has no meaning. No count of steps leads to NaN, to infinity or to the other sign:
such elements are named and counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import torch

from narrowgauge.harness.checks.row_chunks import cached_chunks
from narrowgauge.harness.machine.plain_text import RELATIVE_FROM
from narrowgauge.spec.formats import Format

ORDINARY = "ordinary"
NOT_ZERO = "not 0 where 0 is expected"
OTHER_SIGN = "with the other sign"
NO_CODE = "no code of the format"
KINDS = (
    ORDINARY, NOT_ZERO, OTHER_SIGN, "another NaN than expected", "NaN where a number is expected",
    "a number where NaN is expected", "infinite where a finite number is expected",
    "finite where infinity is expected", NO_CODE,
)  # fmt: skip
"""Kinds of wrong elements, as sentences name them. Both numbers of the first three kinds are finite: the worst element
of a report is of the first occurring kind."""


@dataclass(frozen=True)
class Comparison:
    """Expected and actual result of a stage, both (M, N), in the coordinates of its finding."""

    expected: torch.Tensor
    actual: torch.Tensor
    fmt: Format | None = None
    """Format of the codes (uint8, a byte for each element). None: the results are floating-point numbers."""


@dataclass
class _Extremes:
    """Least and largest value of a measure, and the index of the first element with the largest value."""

    low: float = math.inf
    high: float = -math.inf
    index: int = 0

    def add(self, values: torch.Tensor, indices: torch.Tensor) -> None:
        if not values.numel():
            return
        place = int(values.argmax())
        high = float(values[place])
        self.low = min(self.low, float(values.amin()))
        if high > self.high:
            self.high, self.index = high, int(indices[place])


@dataclass
class Distances:
    """Distances of the wrong elements of a stage, as of `measure`."""

    distance: torch.Tensor
    """Distances of all elements in steps, as given to `measure`."""
    comparison: Comparison | None
    kinds: Counter[str] = field(default_factory=Counter)
    """Number of wrong elements by kind."""
    steps: dict[str, _Extremes] = field(default_factory=lambda: {kind: _Extremes() for kind in KINDS})
    """Distances in steps, by kind."""
    differences: dict[str, _Extremes] = field(default_factory=lambda: {kind: _Extremes() for kind in KINDS})
    """Relative differences, by kind."""

    @property
    def _relative(self) -> bool:
        """Whether ordinary elements are far enough for a relative difference in place of steps."""
        return self.comparison is not None and self.steps[ORDINARY].high >= RELATIVE_FROM

    @property
    def worst(self) -> int:
        """Index of the worst element, counted row by row: of the first kind in `KINDS` that occurs, the farthest. Of
        elements that are no numbers, the first: all are equally bad."""
        kind = next(kind for kind in KINDS if self.kinds[kind])
        far = self._relative if kind == ORDINARY else kind == OTHER_SIGN
        return (self.differences if far else self.steps)[kind].index

    @property
    def sentence(self) -> str:
        """Distance of all wrong elements, as the end of a sentence on their number: `, each by 1 step`, `, by up to
        12 % of the expected value`, or a list of the kinds of elements, with their numbers."""
        others = [(kind, count) for kind in KINDS[1:] if (count := self.kinds[kind])]
        if not others:
            return f", {self._ordinary}"
        if not self.kinds[ORDINARY] and len(others) == 1:
            return f", each {others[0][0]}"
        parts = [f"{format_count(count)} {kind}" for kind, count in others]
        if self.kinds[ORDINARY]:
            parts.append(f"{format_count(self.kinds[ORDINARY])} {self._ordinary.removeprefix('each ')}")
        return f": {', '.join(parts)};"

    @property
    def _ordinary(self) -> str:
        """Distance of the ordinary elements."""
        extremes = (self.differences if self._relative else self.steps)[ORDINARY]
        words = relative_words if self._relative else steps_words
        low, high = words(extremes.low), words(extremes.high)
        by = "" if extremes.high == 0 else "by "
        return f"each {by}{high}" if low == high else f"by up to {high}"

    def words(self, index: int) -> str:
        """Distance of the element with this index, counted row by row: `1 step`, `12 % of the expected value`."""
        steps = int(self.distance.reshape(-1)[index])
        if self.comparison is None:
            return steps_words(steps)
        place = torch.tensor([index], device=self.comparison.expected.device)
        expected, actual = (side.reshape(-1)[place] for side in (self.comparison.expected, self.comparison.actual))
        kind, difference = _judge(expected, actual, place.new_tensor([steps]), self.comparison.fmt)
        name = KINDS[int(kind)]
        if name != ORDINARY:
            return name.removeprefix("with the ")
        return relative_words(float(difference)) if steps >= RELATIVE_FROM else steps_words(steps)


def measure(wrong: torch.Tensor, distance: torch.Tensor, comparison: Comparison | None) -> Distances:
    """Distances of the wrong elements: a bool mask (M, N) or (1,), with their distances in steps, int64.

    `comparison`: both results in the same order of elements. None: elements have no numbers beside their distances, and
    every distance is a number of steps.
    """
    result = Distances(distance, comparison)
    for indices, steps, kinds, differences in _judged_chunks(wrong, distance, comparison):
        counts = torch.bincount(kinds, minlength=len(KINDS)).tolist()
        result.kinds.update({kind: count for kind, count in zip(KINDS, counts, strict=True) if count})
        for number, kind in enumerate(KINDS):
            if counts[number]:
                of_kind = kinds == number
                finite = kind in (ORDINARY, NOT_ZERO, OTHER_SIGN)
                result.steps[kind].add(steps[of_kind] if finite else torch.zeros_like(steps[of_kind]), indices[of_kind])
                result.differences[kind].add(differences[of_kind], indices[of_kind])
    return result


def _judged_chunks(
    wrong: torch.Tensor, distance: torch.Tensor, comparison: Comparison | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of wrong elements, in chunks: index counted row by row, steps, place in `KINDS`, relative difference."""
    start = 0
    for rows in cached_chunks(wrong):
        mask = wrong[rows].reshape(-1)
        chosen = mask.nonzero()[:, 0]
        steps = distance[rows].reshape(-1)[chosen]
        if comparison is None:
            yield chosen + start, steps, torch.zeros_like(steps), steps.double()
        else:
            sides = (comparison.expected, comparison.actual)
            expected, actual = (side.reshape(wrong.shape)[rows].reshape(-1)[chosen] for side in sides)
            yield chosen + start, steps, *_judge(expected, actual, steps, comparison.fmt)
        start += mask.numel()


def _judge(
    expected: torch.Tensor, actual: torch.Tensor, steps: torch.Tensor, fmt: Format | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the elements in `KINDS`, int64, and |actual − expected| / |expected|, float64, also infinite."""
    no_code = torch.zeros_like(actual, dtype=torch.bool)
    if fmt is None:
        e, a = expected.double(), actual.double()
    else:
        no_code = actual.long() >= fmt.codes
        e, a = (_values(fmt, codes.device)[codes.long()] for codes in (expected, actual))
    masks = (
        (e == 0) & (a != 0) & (steps >= RELATIVE_FROM), (e != 0) & (a != 0) & (e.signbit() != a.signbit()),
        e.isnan() & a.isnan(), a.isnan() & ~e.isnan(), e.isnan() & ~a.isnan(),
        a.isinf() & e.isfinite(), e.isinf() & a.isfinite(),
    )  # fmt: skip
    kinds = torch.zeros(e.shape, dtype=torch.int64, device=e.device)
    for number, mask in enumerate(masks, 1):  # the sign of a special value does not matter: the last kind counts
        kinds.masked_fill_(mask, number)
    kinds.masked_fill_(no_code, KINDS.index(NO_CODE))
    return kinds, ((a - e).abs() / e.abs()).nan_to_num(nan=0.0, posinf=math.inf)


@cache
def _values(fmt: Format, device: torch.device) -> torch.Tensor:
    """Number of each of 256 bytes, float64. NaN for bytes above the codes."""
    numbers = [fmt.value(code) if code < fmt.codes else math.nan for code in range(256)]
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def steps_words(steps: float) -> str:
    """`1 step`, `2 steps`: distances in representable values of the format. Only +0 and −0 differ by none."""
    if steps == 0:
        return "the other zero"
    return f"{format_count(int(steps))} step{'s' if steps != 1 else ''}"


def relative_words(difference: float) -> str:
    """A relative difference: `12 % of the expected value`, or `1.05e+06 times the expected value` from 10 on."""
    if difference >= 10:
        return f"{difference:.3g} times the expected value"
    percent = f"{100 * difference:.3g}"
    return f"{percent} % of the expected value" if "e" not in percent else f"{difference:.3g} of the expected value"


def format_count(count: int) -> str:
    """The count with a space between thousands."""
    return f"{count:,}".replace(",", " ")
