"""Recorded cases: a few cases that fail under each mutant, found by an earlier run. They run first."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.tools.mutants.result import MutantResult
from narrowgauge.harness.tools.mutants.selection import sources_of
from narrowgauge.native.runtime.sources import files_of

PATH = Path(__file__).parent / "recorded.json"
"""Names of cases by name of mutant, both sorted. Written by `narrowgauge mutants --search`."""
MOST = 2
"""Largest number of recorded cases of a mutant."""

Recorded = Mapping[str, Sequence[str]]


def read(path: Path | None = None) -> dict[str, list[str]]:
    """The recorded cases; none if there is no file. A name without a mutant or a case has no effect."""
    path = path or PATH
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write(
    results: Iterable[MutantResult], mutants: Iterable[str], cases: Iterable[Case], path: Path | None = None
) -> None:
    """Replace the entries of `results` by their cheapest failing cases, and drop names that are not in `mutants`.

    Cases with an expected cause come before others. A case costs the compilation of the changed kernels first, and
    then the processor time of its judge.
    """
    by_name = {case.id: case for case in cases}

    def rank(result: MutantResult, record: dict[str, Any]) -> tuple[bool, int, float]:
        named = any(entry["cause"] in result.mutant.causes for entry in record["explanations"] if entry["exact"])
        changed = [source for source in sources_of(by_name[record["case"]]) if result.mutant.file in files_of(source)]
        return not named, len(changed), record["seconds_core"] or math.inf

    path = path or PATH
    recorded = read(path)
    for result in results:
        cheapest = sorted(result.failing, key=partial(rank, result))[:MOST]
        recorded[result.mutant.name] = sorted(record["case"] for record in cheapest)
    known = set(mutants)
    kept = {name: entry for name, entry in sorted(recorded.items()) if name in known and entry}
    path.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
