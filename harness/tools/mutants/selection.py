"""The cases that a mutant runs: cases of the kernel or module that the mutant changes, cheap cases first."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache

from narrowgauge.harness.cases.case import Case, select
from narrowgauge.harness.hosts.changed_source import MODULES
from narrowgauge.harness.tools.mutants.mutant import Mutant
from narrowgauge.native.runtime.sources import KERNELS, files_of

_IMPORT = re.compile(r"^from narrowgauge\.native\.modules\.(\w+) import (.+)$", re.MULTILINE)


@cache
def module_files_of(name: str) -> frozenset[str]:
    """Files of `native.modules` that the module class `name` is made of: the file that defines it, and its imports."""
    imports = {path.name: _IMPORT.findall(path.read_text(encoding="utf-8")) for path in MODULES.glob("*.py")}
    waiting = [f"{file}.py" for file, names in imports["__init__.py"] if name in names.split(", ")]
    found: set[str] = set()
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += [f"{other}.py" for other, _ in imports[file]]
    return frozenset(found)


def touched_by(file: str, cases: Iterable[Case]) -> list[Case]:
    """Cases that launch a kernel made of the kernel file `file`, or run a module made of it."""
    if (MODULES / file).is_file():
        return [case for case in cases if any(file in module_files_of(name) for name in case.all_methods())]
    sources = {source for source in KERNELS if file in files_of(source)}
    return [case for case in cases if sources & case.native_sources]


_TYPICAL = 13
"""Binary logarithm of a typical number of elements: a cheap case with all kinds of blocks."""


def selected(mutant: Mutant, cases: Iterable[Case]) -> list[Case]:
    """Cases affected by the mutant, in an order with the greatest variety in front.

    Round robin over operation, recipe and input family, in an order drawn from a hash of their names. Within a group
    sizes near a typical size come first, and empty cases last.
    """
    touched = select(touched_by(mutant.file, cases), keyword=mutant.cases)
    groups: defaultdict[tuple[str, str, str], list[Case]] = defaultdict(list)
    for case in touched:
        groups[case.operation, case.recipe_label, case.inputs].append(case)
    drawn = sorted(groups, key=lambda group: hashlib.blake2b(repr(group).encode(), digest_size=8).digest())
    rounds = itertools.zip_longest(*(sorted(groups[group], key=_distance) for group in drawn))
    return [case for round_ in rounds for case in round_ if case is not None]


def _distance(case: Case) -> float:
    return abs(math.log2(case.elements) - _TYPICAL) if case.elements else math.inf
