"""Causes observed while the backend ran: guard zones, poison, thread orders, and the steps of a module."""

from __future__ import annotations

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.operations.stages.outcome import Outcome

MEMORY_CAUSES = {
    "writes-outside": "it writes outside its outputs",
    "changes-its-input": "it writes into its inputs",
    "never-written": "it leaves elements of its outputs unwritten",
    "reads-outside": "it reads bytes outside its inputs, or memory that nobody wrote",
    "order-of-threads": "its result depends on the order in which threads run",
    "not-repeatable": "its result changes from run to run",
}
"""Causes that the guarded runs report (`harness.operations.stages.repeated`), and their sentences."""
MODULE_CAUSES = {
    "gradient-missing": "a weight has no gradient",
    "gradient-too-early": "a gradient that is to wait does not",
    "recomputed-otherwise": "a second forward gives other bytes than the first",
    "operand-of-the-step-before": "an operand is that of the step before",
    "quantized-twice": "a half is made of the other one's decoded values",
}
"""Causes that the judge of a module's steps reports (`harness.operations.modules.linear`), and their sentences."""


def explain_memory(outcome: Outcome, wrong_stage: StageResult) -> list[Explanation]:
    """Explanations by the observed causes of a wrong stage. They are exact: nothing is inferred from wrong elements."""
    sentences = MEMORY_CAUSES | MODULE_CAUSES
    return [Explanation(cause, sentences[cause], wrong_stage.stage, exact=True) for cause in wrong_stage.causes]
