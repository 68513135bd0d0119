"""Holm's step-down procedure, and the false alarms that a run is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from narrowgauge.spec.recipes import find_recipe

if TYPE_CHECKING:
    from narrowgauge.harness.cases.case import Case

FALSE_ALARM = 1e-9
"""Probability that a right backend fails any case of a whole run by chance: all
tests of docs/tolerance.md#boundary and docs/tolerance.md#stochastic-rounding together."""


def holm(log_p: Sequence[float], log_level: float) -> list[bool]:
    """Which tests reject, of these natural logarithms of p-values, or of bounds above them.

    The smallest of n p-values is compared with level/n, the next with level/(n - 1) and so on, up to the first that is
    larger. Whatever the tests have to do with one another, any false rejection has a probability of at most the level.
    Source: Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    rejected = [False] * len(log_p)
    for rank, index in enumerate(sorted(range(len(log_p)), key=log_p.__getitem__)):
        if log_p[index] > log_level - math.log(len(log_p) - rank):
            break
        rejected[index] = True
    return rejected


def sharing(cases: Iterable[Case]) -> int:
    """How many cases share the false alarms of a run: those that chance can fail; at least 1."""
    return max(1, sum(_by_chance(case) for case in cases))


def _by_chance(case: Case) -> bool:
    """Whether a recipe of the case, or of its training recipe, rotates or rounds stochastically."""
    if case.is_module:
        training = case.training
        return training.input.transform is not None or training.grad.rounding == "stochastic"
    names = [name for name in case.recipes if name]
    if case.operation == "gemm-quantized":
        names.append(case.out_recipe)
    return any(rule.transform is not None or rule.rounding == "stochastic" for rule in map(find_recipe, names))
