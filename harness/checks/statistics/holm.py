"""Holm's step-down procedure, and the probability of a false alarm of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from narrowgauge.harness.cases.case import Case

FALSE_ALARM = 1e-9
"""Probability that a correct backend fails any case of a run by chance: all tests of docs/tolerance.md#boundary and
docs/tolerance.md#stochastic-rounding together."""


def holm(log_p: Sequence[float], log_level: float) -> list[bool]:
    """Rejections of the tests, from natural logarithms of the p-values or of their upper bounds.

    The smallest of n p-values is compared with level/n, the next with level/(n - 1) and so on, up to the first larger
    p-value. The probability of any false rejection is at most the level, for dependent tests too.
    Source: Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    rejected = [False] * len(log_p)
    for rank, index in enumerate(sorted(range(len(log_p)), key=log_p.__getitem__)):
        if log_p[index] > log_level - math.log(len(log_p) - rank):
            break
        rejected[index] = True
    return rejected


def count_chance_cases(cases: Iterable[Case]) -> int:
    """Number of cases that a correct backend can fail by chance, at least 1. They share FALSE_ALARM."""
    return max(1, sum(case.chance for case in cases))
