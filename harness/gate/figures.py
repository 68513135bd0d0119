"""Figures of a case that the gate compares: integers, exact fractions, powers of two."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from narrowgauge.harness.cases.operations import is_composed
from narrowgauge.harness.records.record import VERDICTS, elements_compared, outputs_of
from narrowgauge.harness.report.text import number

BELOW = -1075
"""Exponent for 0: below the smallest double."""
ABOVE = 1 + 2.0**-30
"""Tolerance for budgets. They are often powers of two, evaluated in float64, and their last bits depend on the
machine's matrix product."""
FLOATS = ("exact_share", "ordered_share", "excused_share", "budget_max", "interval_ulps_max")
"""Columns used for figures that could be infinite or NaN."""


@dataclass(frozen=True)
class Figures:
    """Figures of a case in the gate. `str` gives their text in a baseline, and `parse` reads this text."""

    verdict: str
    compared: int = 0
    """Elements compared with an expected value."""
    wrong: int = 0
    ulp: int | None = None
    """Largest distance of a wrong element, or None without a wrong element."""
    outputs: int | None = None
    """Outputs of a product: the denominator of `exact` and `ordered`. None if the operation is no product."""
    exact: int = 0
    ordered: int = 0
    excused: int = 0
    """Elements accepted by docs/tolerance.md#boundary whose bytes differ from the reference's order."""
    budget: int | None = None
    """Least n with budget_max ≤ 2^n·`ABOVE`."""
    width: int | None = None
    """Least n with interval_ulps_max ≤ 2^n·`ABOVE`. A wider interval would make every budget look better."""

    def __post_init__(self) -> None:
        if self.outputs is not None and self.exact + self.ordered > self.outputs:
            raise ValueError(f"exact {self.exact}+{self.ordered} are more than the {self.outputs} outputs")

    def __str__(self) -> str:
        parts = [f"{self.verdict} {self.compared}"]
        if self.wrong:
            parts.append(f"wrong {self.wrong}")
        if self.ulp is not None:
            parts.append(f"ulp {self.ulp}")
        if self.outputs is not None:
            parts.append(f"exact {self.exact}+{self.ordered}/{self.outputs}")
        if self.excused:
            parts.append(f"excused {self.excused}")
        if self.budget is not None:
            parts.append(f"budget {_power(self.budget)}")
        if self.width is not None:
            parts.append(f"width {_power(self.width)}")
        return ", ".join(parts)


def not_finite(record: dict[str, Any]) -> list[str]:
    """Infinite or NaN figures of a record, as text: `budget_max is nan`."""
    return [f"{name} is {value}" for name in FLOATS if (value := record[name]) is not None and not math.isfinite(value)]


def figures(record: dict[str, Any]) -> Figures:
    """Figures of a record (`Record.to_dict`) without `not_finite` figures.

    Shares become counts. A record stores k of n outputs as the float k/n. A CPU divides, and a GPU multiplies by 1/n,
    so the float's last bit depends on the machine. The nearest integer to share × n is k on both.
    """
    verdict, compared = record["verdict"], elements_compared(record)
    wrong, ulp = record["mismatches"], record["max_ulp"]
    if is_composed(record["operation"]):
        return Figures(verdict, compared, wrong, ulp)
    outputs = outputs_of(record)
    tiers = outputs > 0 and record["exact_share"] is not None
    return Figures(
        verdict,
        compared,
        wrong,
        ulp,
        outputs=outputs if tiers else None,
        exact=round(record["exact_share"] * outputs) if tiers else 0,
        ordered=round((record["ordered_share"] or 0) * outputs) if tiers else 0,
        excused=sum([stage["excused"] for stage in record["stages"] if stage["rule"] == "boundary"]),
        budget=exponent(record["budget_max"]),
        width=exponent(record["interval_ulps_max"]),
    )


def exponent(value: float | None) -> int | None:
    """Least n with value ≤ 2^n·`ABOVE`, for a finite value ≥ 0. `BELOW` for 0, None for None."""
    if value is None:
        return None
    if value == 0:
        return BELOW
    mantissa, power = math.frexp(value / ABOVE)
    return power - 1 if mantissa == 0.5 else power


_TEXT = re.compile(
    rf"(?P<verdict>{'|'.join(VERDICTS)}) (?P<compared>\d+)(, wrong (?P<wrong>\d+))?(, ulp (?P<ulp>\d+))?"
    r"(, exact (?P<exact>\d+)\+(?P<ordered>\d+)/(?P<outputs>\d+))?(, excused (?P<excused>\d+))?"
    r"(, budget (?P<budget>0|2\^-?\d+))?(, width (?P<width>0|2\^-?\d+))?"
)


def parse(text: str) -> Figures:
    """The figures in a text written by `str`. Raises ValueError for an invalid text."""
    match = _TEXT.fullmatch(text)
    if match is None:
        example = Figures("fail", 561, wrong=12, ulp=1, outputs=561, exact=400, ordered=61, budget=-1, width=3)
        raise ValueError(f"{text!r} are no figures; they look like {str(example)!r}")
    groups = {name: value for name, value in match.groupdict().items() if value is not None}
    verdict = groups.pop("verdict")
    powers = {name: _exponent(groups.pop(name)) for name in ("budget", "width") if name in groups}
    return Figures(verdict, **{name: int(value) for name, value in groups.items()}, **powers)


def _power(exponent: int) -> str:
    return "0" if exponent == BELOW else f"2^{exponent}"


def _exponent(text: str) -> int:
    return BELOW if text == "0" else int(text.removeprefix("2^"))


@dataclass(frozen=True)
class Change:
    """A changed figure."""

    figure: str
    before: str
    after: str
    worse: bool

    def __str__(self) -> str:
        """The figure in words: `largest error 3 ulp, was 0`."""
        return f"{_WORDS[self.figure].format(self.after)}, was {self.before}"


_WORDS = {
    "verdict": "{}", "compared": "{} elements compared", "wrong": "{} wrong elements", "ulp": "largest error {} ulp",
    "exact share": "{} outputs exact", "exact or ordered share": "{} outputs exact or in the declared order",
    "excused": "{} elements excused", "budget": "largest fraction of the bound {}",
    "interval width": "widest interval {}",
}  # fmt: skip


def total(parts: Iterable[Figures]) -> Figures:
    """Figures of several cases together: sums of counts, largest error, budget and width. Verdicts that differ are
    joined by a slash."""
    parts = list(parts)

    def count(name: str) -> int:
        return sum(getattr(part, name) or 0 for part in parts)

    def largest(name: str) -> int | None:
        return max((value for part in parts if (value := getattr(part, name)) is not None), default=None)

    return Figures(
        "/".join(sorted({part.verdict for part in parts})),
        compared=count("compared"), wrong=count("wrong"), ulp=largest("ulp"),
        outputs=count("outputs") if any(part.outputs is not None for part in parts) else None,
        exact=count("exact"), ordered=count("ordered"), excused=count("excused"),
        budget=largest("budget"), width=largest("width"),
    )  # fmt: skip


def changes(before: Figures, after: Figures) -> list[Change]:
    """Figures that differ between `before` and `after`, worse figures first.

    A changed verdict is worse, unless it is pass now. Fewer compared elements, or fewer outputs with known bits, are
    worse too: the test is weaker. For a case without a result only the verdict is compared.
    """
    changed = []
    if before.verdict != after.verdict:
        changed.append(Change("verdict", before.verdict, after.verdict, after.verdict != "pass"))
    if "pass" in after.verdict or "fail" in after.verdict:
        for figure, value in _VALUES.items():
            old_value, new_value = value(before), value(after)
            if old_value.text != new_value.text:
                changed.append(Change(figure, old_value.text, new_value.text, new_value.badness > old_value.badness))
    return sorted(changed, key=lambda change: not change.worse)


@dataclass(frozen=True)
class _Value:
    text: str
    badness: Fraction


def _count(value: int) -> _Value:
    return _Value(number(value), Fraction(value))


def _ulp(case_figures: Figures) -> _Value:
    return _count(case_figures.ulp) if case_figures.ulp is not None else _Value("0", Fraction(-1))


def _share(count: int, case_figures: Figures) -> _Value:
    """Share of the outputs. A lower share is worse, and a missing share is worst."""
    if case_figures.outputs is None:
        return _Value("not measured", Fraction(1))
    return _Value(f"{number(count)} of {number(case_figures.outputs)}", -Fraction(count, case_figures.outputs or 1))


def _power_value(exponent: int | None, missing: Fraction, unit: str = "") -> _Value:
    if exponent is None:
        return _Value("not measured", missing)
    return _Value(f"{_power(exponent)}{unit}", Fraction(exponent))


_WORST, _BEST = Fraction(1 << 20), Fraction(-(1 << 20))
_VALUES: dict[str, Callable[[Figures], _Value]] = {
    "ulp": _ulp,
    "wrong": lambda one: _count(one.wrong),
    "budget": lambda one: _power_value(one.budget, _WORST),
    "exact share": lambda one: _share(one.exact, one),
    "exact or ordered share": lambda one: _share(one.exact + one.ordered, one),
    # An interval is measured only if the order of a sum matters. A missing interval is best.
    "interval width": lambda one: _power_value(one.width, _BEST, " ulp"),
    "excused": lambda one: _count(one.excused),
    "compared": lambda one: _Value(number(one.compared), Fraction(-one.compared)),
}
"""Name and badness of every figure except the verdict."""
