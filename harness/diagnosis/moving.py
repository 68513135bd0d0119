"""Operations that only move or rotate: swizzle, transform, padding, histories."""

from __future__ import annotations

from harness.checks.stage import StageResult
from harness.diagnosis.explanation import Explanation
from harness.operations.outcome import Outcome


def moving_explanations(outcome: Outcome, wrong: StageResult) -> list[Explanation]:
    return []
