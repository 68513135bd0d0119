"""Explanations of operations whose judge names the known mistakes of a stage (`Outcome.causes`)."""

from __future__ import annotations

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.diagnosis.search.time_limit import TimeLimit
from narrowgauge.harness.operations.stages.outcome import Outcome


def explain_by_results(outcome: Outcome, wrong_stage: StageResult, limit: TimeLimit) -> list[Explanation]:
    """Known mistakes of the wrong stage that give the kernel's result."""
    search = outcome.causes.get(wrong_stage.stage)
    explanations: dict[str, Explanation] = {}
    for cause, sentence in search(wrong_stage, limit) if search is not None else ():
        explanations.setdefault(cause, Explanation(cause, sentence, wrong_stage.stage, exact=True))
    return list(explanations.values())
