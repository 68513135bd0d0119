"""What was seen while a backend ran: by guard zones, poison and other orders of threads, and in a module's steps."""

from __future__ import annotations

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.operations.stages.outcome import Outcome

SENTENCES = {
    "writes-outside": "it writes outside its outputs",
    "changes-its-input": "it writes into its inputs",
    "never-written": "it leaves elements of its outputs unwritten",
    "reads-outside": "it reads bytes outside its inputs, or memory that nobody wrote",
    "order-of-threads": "its result depends on the order in which threads run",
    "not-repeatable": "its result changes from run to run",
}
"""What whoever ran the backend can have found out, `harness.operations.stages.repeated`."""
OF_STEPS = {
    "gradient-missing": "a weight has no gradient",
    "gradient-too-early": "a gradient that is to wait does not",
    "recomputed-otherwise": "a second forward gives other bytes than the first",
    "operand-of-the-step-before": "an operand is that of the step before",
    "quantized-twice": "a half is made of the other one's decoded values",
}
"""What whoever judged a module's steps can have found out, `harness.operations.modules.linear`."""


def memory_explanations(outcome: Outcome, wrong: StageResult) -> list[Explanation]:
    """What is known of a wrong stage. Exact: it was seen, not concluded from wrong elements."""
    known = SENTENCES | OF_STEPS
    return [Explanation(cause, known[cause], wrong.stage, exact=True) for cause in wrong.causes]
