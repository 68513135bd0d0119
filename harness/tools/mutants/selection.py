"""Which cases a mutant runs, in which order."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable

from narrowgauge.harness.cases.case import Case, select
from narrowgauge.harness.tools.mutants.mutant import Mutant
from narrowgauge.harness.tools.mutants.touches import touched_by

_TYPICAL = 13
"""Binary logarithm of how many elements a case has that costs little and still has all kinds of blocks."""


def selected(mutant: Mutant, cases: Iterable[Case]) -> list[Case]:
    """The cases that the change touches, such that a few of any part show much.

    Round robin over operation, recipe and input family, in an order that is drawn by their names: what comes early
    differs in all of them. Of each, the sizes nearest to a typical one come first, empty ones last.
    """
    touched = select(touched_by(mutant.file, cases), keyword=mutant.cases)
    groups: defaultdict[tuple[str, str, str], list[Case]] = defaultdict(list)
    for case in touched:
        groups[case.operation, case.recipe, case.inputs].append(case)
    drawn = sorted(groups, key=lambda group: hashlib.blake2b(repr(group).encode(), digest_size=8).digest())
    rounds = itertools.zip_longest(*(sorted(groups[group], key=_distance) for group in drawn))
    return [case for one in rounds for case in one if case is not None]


def _distance(case: Case) -> float:
    if case.operation.startswith("gemm"):
        m, k, n = case.shape
        size = m * k + n * k
    else:
        size = math.prod(case.shape)
    return abs(math.log2(size) - _TYPICAL) if size else math.inf
