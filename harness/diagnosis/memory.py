"""Memory and order: what guard zones, poison and other orders of threads tell."""

from __future__ import annotations

from harness.checks.stage import StageResult
from harness.diagnosis.explanation import Explanation
from harness.operations.outcome import Outcome

SENTENCES = {
    "writes-outside": "it writes outside its outputs",
    "changes-its-input": "it writes into its inputs",
    "never-written": "it leaves elements of its outputs unwritten",
    "reads-outside": "it reads bytes outside its inputs, or memory that nobody wrote",
    "order-of-threads": "its result depends on the order in which threads run",
    "not-repeatable": "its result changes from run to run",
}
"""What whoever ran the backend can have found out, `harness.operations.repeated`."""


def memory_explanations(outcome: Outcome, wrong: StageResult) -> list[Explanation]:
    """What is known of a wrong stage `memory` or `repeat`. Exact: it was seen, not concluded from wrong elements."""
    return [Explanation(cause, SENTENCES[cause], wrong.stage, exact=True) for cause in wrong.causes]
