"""Recorded results of an earlier search: a few failing cases per mutant, which run first, and the conventional tests
that detect the mutant."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.tools.mutants.conventional_tests import Detections
from narrowgauge.harness.tools.mutants.mutant import MUTANTS
from narrowgauge.harness.tools.mutants.result import MutantResult
from narrowgauge.native.runtime.sources import files_of

PATH = MUTANTS / "recorded.json"
"""Recorded results, sorted, a line for each mutant. Written by `narrowgauge mutants --search`."""
MOST = 2
"""Largest number of recorded cases of a mutant."""


@dataclass(frozen=True)
class Entry:
    """Recorded result of a mutant."""

    cases: tuple[str, ...]
    """Names of failing cases, sorted."""
    detections: Detections
    """Results of the conventional tests. They depend on the kernels and the mutant, and on no case."""


Recorded = Mapping[str, Entry]
_TESTS = tuple(field.name for field in fields(Detections))


def read(path: Path | None = None) -> dict[str, Entry]:
    """The recorded results; empty if there is no file. A name without a mutant or a case has no effect."""
    path = path or PATH
    if not path.is_file():
        return {}
    entries = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: Entry(tuple(entry["cases"]), Detections(**{test: test in entry["detected"] for test in _TESTS}))
        for name, entry in entries.items()
    }


def write(
    results: Iterable[MutantResult], mutants: Iterable[str], cases: Iterable[Case], path: Path | None = None
) -> None:
    """Replace the entries of `results` by their cheapest failing cases, and drop names that are not in `mutants`.

    Cases with an expected first cause come first. A case costs the compilation of the changed kernels
    first, and then the processor time of its judge.
    """
    by_name = {case.id: case for case in cases}

    def rank(result: MutantResult, record: dict[str, Any]) -> tuple[bool, int, float]:
        exact = [entry["cause"] for entry in record["explanations"] if entry["exact"]]
        named = bool(exact) and exact[0] in result.mutant.causes
        changed = [
            source for source in by_name[record["case"]].native_sources if result.mutant.file in files_of(source)
        ]
        return not named, len(changed), record["seconds_core"] or math.inf

    path = path or PATH
    recorded = read(path)
    for result in results:
        cheapest = sorted(result.failing, key=partial(rank, result))[:MOST]
        names = tuple(sorted(record["case"] for record in cheapest))
        recorded[result.mutant.name] = Entry(names, result.detections)
    known = set(mutants)
    kept = {
        name: {"cases": entry.cases, "detected": [test for test, seen in asdict(entry.detections).items() if seen]}
        for name, entry in sorted(recorded.items())
        if name in known and entry.cases
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in kept.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
