"""Signatures: what all wrong elements of a stage have in common."""

from __future__ import annotations

from harness.checks.stage import StageResult
from harness.diagnosis.explanation import Explanation
from harness.operations.outcome import Outcome


def signatures(outcome: Outcome, wrong: StageResult) -> list[Explanation]:
    return []
