"""The figures of a case that the gate compares: integers, exact fractions and powers of two; and the device class."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from narrowgauge.harness.cases.schema import MODULES
from narrowgauge.harness.records.record import VERDICTS, elements_compared

HOST = "host"


def device_class(device: str, environment: dict[str, str]) -> str:
    """`host` of what ran on "cpu"; `NVIDIA H200` and the like of what ran on a GPU, as `environment` names it.

    `environment` is that of `harness.records.environment.describe_run`. A MIG slice is of its GPU's class.
    """
    if device == "cpu":
        return HOST
    name = environment.get("GPU", "an unknown GPU").partition(", compute capability")[0]
    return name.partition(" MIG ")[0]


BELOW = -1075
"""The power of two that stands for 0: below the least double."""
ABOVE = 1 + 2.0**-30
"""Budgets are often powers of two, evaluated in float64, whose last bits depend on the machine's matrix product."""
FLOATS = ("exact_share", "ordered_share", "excused_share", "budget_max")
"""Columns of a record that figures are made of and that could be infinite or NaN."""


@dataclass(frozen=True)
class Figures:
    """What the gate holds of one case. `str` gives them as a baseline has them, and `parse` reads that."""

    verdict: str
    compared: int = 0
    """Elements held against what they should be."""
    wrong: int = 0
    ulp: int | None = None
    """Largest distance of a wrong element; None where none is wrong."""
    outputs: int | None = None
    """Outputs of a product, whose tiers the next two count; None where there are none."""
    exact: int = 0
    ordered: int = 0
    excused: int = 0
    """Elements that are right by docs/tolerance.md#boundary, though not the bytes of the reference's order."""
    budget: int | None = None
    """Least n with budget_max ≤ 2^n·`ABOVE`."""
    width: int | None = None
    """Least n with interval_ulps_max ≤ 2^n·`ABOVE`: a bound that grows makes every budget look better."""

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
    """The figures of a record that are infinite or NaN, in words: `budget_max is nan`."""
    named = ((name, record[name]) for name in FLOATS)
    return [f"{name} is {value}" for name, value in named if value is not None and not math.isfinite(value)]


def figures(record: dict[str, Any]) -> Figures:
    """The figures of a record (`Record.to_dict`) of which none is `not_finite`.

    Shares become counts. A record holds k of n outputs as the float k/n, which a CPU divides and a GPU multiplies by
    1/n: the float's last bit depends on the machine, the nearest integer to share × n is k on all.
    """
    counts = Figures(
        verdict=record["verdict"],
        compared=elements_compared(record),
        wrong=record["mismatches"],
        ulp=record["max_ulp"],
    )
    if record["operation"] in MODULES:
        return counts
    outputs = sum(stage["compared"] for stage in record["stages"] if stage["rule"] == "bound")
    tiers = outputs > 0 and record["exact_share"] is not None
    return replace(
        counts,
        outputs=outputs if tiers else None,
        exact=round(record["exact_share"] * outputs) if tiers else 0,
        ordered=round((record["ordered_share"] or 0) * outputs) if tiers else 0,
        excused=sum(stage["excused"] for stage in record["stages"] if stage["rule"] == "boundary"),
        budget=exponent(record["budget_max"]),
        width=exponent(record["interval_ulps_max"]),
    )


def exponent(value: float | None) -> int | None:
    """Least n with value ≤ 2^n·`ABOVE`, of a finite value that is not negative; `BELOW` of 0, None of None."""
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
    """The figures that `str` wrote. Raises ValueError of anything else."""
    found = _TEXT.fullmatch(text)
    if found is None:
        example = Figures("fail", 561, wrong=12, ulp=1, outputs=561, exact=400, ordered=61, budget=-1, width=3)
        raise ValueError(f"{text!r} are no figures; they look like {str(example)!r}")
    given = {name: value for name, value in found.groupdict().items() if value is not None}
    verdict = given.pop("verdict")
    powers = {name: _exponent(given.pop(name)) for name in ("budget", "width") if name in given}
    return Figures(verdict, **{name: int(value) for name, value in given.items()}, **powers)


def _power(exponent: int) -> str:
    return "0" if exponent == BELOW else f"2^{exponent}"


def _exponent(text: str) -> int:
    return BELOW if text == "0" else int(text.removeprefix("2^"))


@dataclass(frozen=True)
class Change:
    """One figure that is not what it was."""

    figure: str
    before: str
    after: str
    worse: bool

    def __str__(self) -> str:
        return f"{self.figure} {self.before} → {self.after}"


def changes(before: Figures, after: Figures) -> list[Change]:
    """The figures in which `after` is not `before`, those that are worse first.

    Any other verdict than before is worse, but pass. Fewer elements compared, or fewer outputs whose bits are known,
    is worse too: it is a weaker test. Where a case has no result there is no other figure to speak of.
    """
    found = []
    if before.verdict != after.verdict:
        found.append(Change("verdict", before.verdict, after.verdict, after.verdict != "pass"))
    if after.verdict in ("pass", "fail"):
        for figure, value in _VALUES.items():
            was, now = value(before), value(after)
            if was.text != now.text:
                found.append(Change(figure, was.text, now.text, now.badness > was.badness))
    return sorted(found, key=lambda change: not change.worse)


@dataclass(frozen=True)
class _Value:
    text: str
    badness: Fraction


def _count(value: int) -> _Value:
    return _Value(str(value), Fraction(value))


def _ulp(one: Figures) -> _Value:
    return _count(one.ulp) if one.ulp is not None else _Value("none", Fraction(-1))


def _share(count: int, one: Figures) -> _Value:
    """A share of the outputs, of which less is worse, and none at all the worst."""
    if one.outputs is None:
        return _Value("not measured", Fraction(1))
    return _Value(f"{count}/{one.outputs}", -Fraction(count, one.outputs or 1))


def _used(exponent: int | None, missing: Fraction) -> _Value:
    if exponent is None:
        return _Value("not measured", missing)
    return _Value(_power(exponent), Fraction(exponent))


_WORST, _BEST = Fraction(1 << 20), Fraction(-(1 << 20))
_VALUES: dict[str, Callable[[Figures], _Value]] = {
    "compared": lambda one: _Value(str(one.compared), Fraction(-one.compared)),
    "wrong": lambda one: _count(one.wrong),
    "ulp": _ulp,
    "exact share": lambda one: _share(one.exact, one),
    "exact or ordered share": lambda one: _share(one.exact + one.ordered, one),
    "excused": lambda one: _count(one.excused),
    "budget": lambda one: _used(one.budget, _WORST),
    # An interval is measured where the order of a sum matters, and nowhere is best.
    "interval width": lambda one: _used(one.width, _BEST),
}
"""Every figure but the verdict: what it is called, and how bad it is."""
