"""Known mistakes that the inputs of cases show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.power.subject import trial_of
from narrowgauge.harness.power.trial import same_results


def shown_mistakes(cases: Sequence[Case], seed: int) -> dict[str, Any]:
    """Number of known mistakes of an operation, and of mistakes that change a byte of a result on the inputs of a case.

    The keys are those of the field `strength` of docs/schema.md#result-of-check. A case whose operation has no list of
    mistakes is left out.
    """
    known: dict[str, bool] = {}
    measured = []
    for case in cases:
        trial = trial_of(case, seed)
        if trial is None:
            continue
        measured.append(case.id)
        for mistake in trial.mistakes():
            if known.setdefault(mistake.name, False):
                continue
            try:
                known[mistake.name] = not same_results(mistake.results(), trial.right)
            except ValueError:  # no such mistake on these inputs
                continue
    hidden = [name for name, shown in known.items() if not shown]
    return {"known": len(known), "shown": len(known) - len(hidden), "hidden": hidden, "cases": measured}
