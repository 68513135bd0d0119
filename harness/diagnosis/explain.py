"""The explanations of one wrong outcome, the best first."""

from __future__ import annotations

from narrowgauge.harness.diagnosis.auxiliary.explain_auxiliary import moving_explanations
from narrowgauge.harness.diagnosis.decoding import decoding_explanations
from narrowgauge.harness.diagnosis.explanation import Explanation, Tried
from narrowgauge.harness.diagnosis.formulas import formula_explanations
from narrowgauge.harness.diagnosis.gemm.explain_gemm import product_explanations
from narrowgauge.harness.diagnosis.gemm.fused_outputs import fusing_explanations
from narrowgauge.harness.diagnosis.memory import memory_explanations
from narrowgauge.harness.diagnosis.patterns.signatures import signatures
from narrowgauge.harness.diagnosis.quantize.explain_quantize import quantizing_explanations
from narrowgauge.harness.operations.stages.outcome import Outcome


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
