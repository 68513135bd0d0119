"""Conditions of a failure: values of keys of the case without which the kernel is right.

Each size of the shape and each key of the failing case is changed alone, to an ordinary value. A value is a condition
if the kernel is right with the ordinary value on all inputs of the test, and wrong with the value of the case so often
that chance explains the difference in less than 1 of 10 000 searches. With the ordinary value the kernel must also be
right in a case of ordinary sizes on every input family: small shapes can show a mistake of all shapes more often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, replace
from functools import partial
from math import comb
from typing import Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.keys import DTYPES, Key, keys_of, sizes_of
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.operations.stages.deviation import Deviation

CONDITION: Deviation[Case] = Deviation(
    "when:{}", "only with {}: wrong on {} of {} inputs, right on all {} with {}", "case", exact=False
)  # fmt: skip
Passes = Callable[[Case, Case, int], bool | None]
"""Function from a case, a case of the same shape or another shape, and a number to whether the kernel is right in the
first case, on the tensors of the second case with this number if the shapes are equal. None: it gives no result, or the
dtype of the first case does not hold the numbers."""


class Stopped(Exception):
    """The search has no work left: what was not tried is no evidence."""


CHANCE = 1e-4
"""Probability that a failure seems to depend on a key and does not."""
MOST = 16
"""Inputs with each value of a key."""
_RIGHT = 5
"""Inputs on which the kernel may be right with the value of the case: with more, chance explains the rest."""
_ORDINARY = 128, 64
"""Ordinary sizes: whole blocks and tiles of most recipes."""
_MULTIPLES = 2, 16, 32, 64, 128
_PROBES = 1, 2, 3, 16, 17, 32, 48, 63, 64, 96, 128, 129, 160, 192, 256
"""Sizes by which the wrong sizes are told: a single size, odd sizes, tails, small sizes."""
_OTHERS = frozenset({"recipe", "w_recipe", "out_recipe", "training", "shape", "inputs", "random", "bands", "use",
                     "autograd", "repeats", "concurrency"})  # fmt: skip
"""Keys without conditions, and keys whose conditions the judge of the case finds."""


def conditions(case: Case, stage: str, passes: Passes) -> list[Explanation]:
    """The conditions of a failing case, in the order of its keys, those found before `passes` raises Stopped. `stage`:
    its first wrong stage."""
    found: list[Explanation] = []
    with suppress(Stopped):
        found.extend(_conditions(case, stage, passes))
    return found


def _conditions(case: Case, stage: str, passes: Passes) -> Iterator[Explanation]:
    names = sizes_of(type(case))
    for number, name in enumerate(names if len(case.shape) == len(names) else ()):
        size = case.shape[number]
        other = _ORDINARY[size == _ORDINARY[0]]
        if counts := _counts(case, _sized(case, number, other), passes):
            words = _extent(name, size, other, partial(_is_right_at, case, number, passes))
            yield _condition(words, f"{name} = {other}", counts, stage)
    for key, value, other in _changed_keys(case):
        if counts := _counts(case, _valid(case, **{key.field: other}), passes):
            yield _condition(_words(key, value), _words(key, other), counts, stage)


def _condition(words: str, others: str, counts: tuple[int, int], stage: str) -> Explanation:
    wrong, tried = counts
    sentence = CONDITION.sentence.format(words, wrong, tried, tried, others)
    return Explanation(CONDITION.cause.format(words.partition(" ")[0]), sentence, stage, exact=False)


def _changed_keys(case: Case) -> Iterator[tuple[Key, Any, Any]]:
    """Keys beside the shape, with the value of the case and an ordinary value."""
    for key in keys_of(type(case)):
        if key.field in _OTHERS:
            continue
        value = getattr(case, key.field)
        if value in DTYPES:
            yield key, value, "bf16" if value == "fp32" else "fp32"  # float32 holds the numbers of the others
        elif key.default is not MISSING and value != key.default:
            yield key, value, key.default


def _words(key: Key, value: Any) -> str:
    return f"{key.name} = {str(value).lower() if isinstance(value, bool) else value}"


def _valid(case: Case, **changes: Any) -> Case | None:
    """The changed case, or None if the case has a problem."""
    try:
        changed = replace(case, **changes)
        return None if changed.problem() else changed
    except (ValueError, KeyError, ZeroDivisionError):
        return None


def _sized(case: Case, number: int, size: int) -> Case | None:
    return _valid(case, shape=(*case.shape[:number], size, *case.shape[number + 1 :]))


def _is_right_at(case: Case, number: int, passes: Passes, size: int) -> bool | None:
    sized = _sized(case, number, size)
    return None if sized is None else passes(sized, sized, 0)


def _counts(case: Case, other: Case | None, passes: Passes) -> tuple[int, int] | None:
    """The numbers of wrong inputs and of all inputs of the case; None unless chance is excluded.

    If failures do not depend on the key, all w failures of 2n results lie in a given half of the results with the
    probability C(n, w)/C(2n, w) (Fisher's exact test).
    """
    if other is None:
        return None
    wrong = 0
    for tried in range(1, MOST + 1):
        if not passes(other, case, tried - 1):
            return None
        right = passes(case, case, tried - 1)
        wrong += right is False
        if right is None or tried - wrong > _RIGHT:
            return None
        if comb(tried, wrong) < CHANCE * comb(2 * tried, wrong):
            return (wrong, tried) if _is_right(other, case, passes) else None
    return None


def _is_right(other: Case, case: Case, passes: Passes) -> bool:
    """Whether the kernel is right in the changed case with ordinary sizes, on every input family with a result."""
    for number in range(len(case.shape)):
        sized = _sized(other, number, _ORDINARY[0]), _sized(case, number, _ORDINARY[0])
        other, case = sized[0] or other, sized[1] or case
    families = ((_valid(other, inputs=name), _valid(case, inputs=name)) for name in case.families())
    return not any(a is not None and passes(a, b or a, 0) is False for a, b in families)


def _extent(name: str, size: int, other: int, right: Callable[[int], bool | None]) -> str:
    """The wrong sizes, by probes of further sizes: a single size, no multiples of a unit, sizes up to a limit."""
    results = {size: False, other: True}
    for probe in dict.fromkeys([size - 1, size + 1, *_PROBES]):
        if probe >= 0 and probe not in results and (result := right(probe)) is not None:
            results[probe] = result
    wrong = {n for n, passed in results.items() if not passed}
    passed = results.keys() - wrong
    if len(wrong) == 1:
        return f"{name} = {size}"
    for unit in _MULTIPLES:
        if all(n % unit for n in wrong) and not any(n % unit for n in passed):
            return f"{name} no multiple of {unit}"
    above = min(wrong) > max(passed)
    if not above and max(wrong) > min(passed):
        units = (unit for unit in _MULTIPLES if all(n % unit for n in wrong) and any(n % unit == 0 for n in passed))
        rule = next((f"{name} no multiple of {unit}" for unit in units), None)
        return rule or f"{name} = {', '.join(map(str, sorted(wrong)))}"
    low, high = (max(passed), min(wrong)) if above else (max(wrong), min(passed))
    while high - low > 1:  # the wrong side of the middle is unknown
        middle = (low + high) // 2
        if (result := right(middle)) is None:
            break
        low, high = (middle, high) if result == above else (low, middle)
    return f"{name} ≥ {high}" if above else f"{name} ≤ {low}"
