"""Products: known deviations of a GEMM, each run again."""

from __future__ import annotations

from harness.checks.stage import StageResult
from harness.diagnosis.explanation import Explanation
from harness.operations.outcome import Outcome


def product_explanations(outcome: Outcome, wrong: StageResult) -> list[Explanation]:
    return []
