"""The explanations of one wrong outcome, the best first."""

from __future__ import annotations

from harness.diagnosis.decoding import decoding_explanations
from harness.diagnosis.explanation import Explanation
from harness.diagnosis.formulas import formula_explanations
from harness.diagnosis.fusing import fusing_explanations
from harness.diagnosis.memory import memory_explanations
from harness.diagnosis.moving import moving_explanations
from harness.diagnosis.multiplying import product_explanations
from harness.diagnosis.quantizing import quantizing_explanations
from harness.diagnosis.signatures import signatures
from harness.diagnosis.tried import Tried
from harness.operations.outcome import Outcome


def explain(outcome: Outcome, tried: Tried) -> list[Explanation]:
    """What explains the first wrong stage: deviations that give the kernel's bytes, then what wrong elements share.

    `tried` is what the diagnosis of earlier outcomes of this backend has tried, and is added to.
    """
    wrong = next((stage for stage in outcome.stages if not stage.right), None)
    if wrong is None:
        return []
    found = memory_explanations(outcome, wrong)
    found += quantizing_explanations(outcome, wrong, tried)
    found += fusing_explanations(outcome, wrong)
    found += product_explanations(outcome, wrong, tried)
    found += moving_explanations(outcome, wrong)
    found += formula_explanations(outcome, wrong)
    found += decoding_explanations(outcome, wrong, tried)
    return [*found, *signatures(outcome, wrong)]
