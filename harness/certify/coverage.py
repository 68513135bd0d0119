"""Coverage of numbers in the inputs of cases: `narrowgauge list --coverage`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from operator import or_

from narrowgauge.harness.backends.results import matrix_shape
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.inputs.capture import Captured
from narrowgauge.harness.inputs.reached import BitSet, Reached
from narrowgauge.harness.operations.quantize.case import QuantizeCase
from narrowgauge.harness.operations.quantize.reach import has_coverage, reached
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.report.text import number
from narrowgauge.reference.quantize.quantize import quantize


def by_family(cases: Iterable[Case], captured: Captured | None = None) -> dict[str, dict[str, Reached]]:
    """Sets reached by the rowwise cases of quantize, by recipe and input family. `captured`: file of their tensors."""
    found: dict[str, dict[str, Reached]] = {}
    made = set[tuple[object, ...]]()
    for case in cases:
        if case.operation != QuantizeCase.operation or getattr(case, "usage", "") != "rowwise":
            continue
        recipe = case.recipes[0]
        key = (recipe, case.shape, getattr(case, "dtype", ""), case.inputs)
        if getattr(case, "bands", False) or not has_coverage(recipe) or key in made:
            continue
        made.add(key)
        x = make_inputs(case, captured=captured).x
        x = x.reshape(matrix_shape(x))
        families, now = found.setdefault(str(recipe), {}), reached(x, quantize(x, recipe))
        families[case.inputs] = families[case.inputs] | now if case.inputs in families else now
    return found


def lines(cases: Iterable[Case]) -> Iterator[str]:
    """For every recipe a line with the shares, and a line for every family with cells of its own."""
    found = by_family(cases)
    if not found:
        yield _NOTHING
    for recipe, families in found.items():
        yield f"{recipe}: {_shares(_union(families))}"
        yield from (f"    {line}" for line in _of_families(families))


def compared_lines(cases: Iterable[Case], captured: Captured, others: Iterable[Case]) -> Iterator[str]:
    """For every recipe of cases of captured tensors their shares beside those of `others`, cases of input families."""
    found = by_family(cases, captured)
    if not found:
        yield _NOTHING
    families = by_family(case for case in others if case.recipe_label in found)
    for recipe, tensors in found.items():
        own = _union(tensors)
        yield f"{recipe}, captured tensors: {_shares(own)}"
        if recipe in families:
            theirs = _union(families[recipe])
            alone = [
                len(_reached(one)) - len(_reached(one) & other.cells) for one, other in ((own, theirs), (theirs, own))
            ]
            yield f"{recipe}, input families: {_shares(theirs)}"
            yield f"    {number(alone[0])} pairs only by the captured tensors, {number(alone[1])} only by the families"


_NOTHING = "no rowwise case of quantize has byte scales, rounding to nearest and no rotation"


def _union(families: Mapping[str, Reached]) -> Reached:
    return reduce(or_, families.values())


def _reached(each: Reached) -> BitSet:
    return each.cells & each.possible


def _shares(union: Reached) -> str:
    scales, scales_of = union.scales()
    text = f"{union.percent} of {number(len(union.possible))} pairs of a scale and a side of a boundary, {scales} of "
    sets = (f", {some} of {of} {words}" for words, (some, of) in union.plain().items())
    return f"{text}{scales_of} scales{''.join(sets)}"


def _of_families(families: Mapping[str, Reached]) -> Iterator[str]:
    """Families with cells of their own, the most first."""
    once = twice = 0
    for each in families.values():
        bits = _reached(each).bits
        once, twice = once | bits, twice | (once & bits)
    for family, each in sorted(families.items(), key=lambda entry: -len(_reached(entry[1]))):
        own = (_reached(each).bits & ~twice).bit_count()
        if own:
            yield f"{family}: {number(len(_reached(each)))}, {number(own)} of these alone"
