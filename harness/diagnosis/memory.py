"""Memory and order: what guard zones, poison and other orders of threads tell."""

from __future__ import annotations

from harness.checks.stage import StageResult
from harness.diagnosis.explanation import Explanation
from harness.operations.outcome import Outcome


def memory_explanations(outcome: Outcome, wrong: StageResult) -> list[Explanation]:
    return []
