"""Judging one case, and the explanations of a wrong outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from narrowgauge.harness.backends.backend import Backend, error_location
from narrowgauge.harness.cases.case import Case

if TYPE_CHECKING:
    from narrowgauge.harness.inputs.inputs import Inputs
    from narrowgauge.harness.operations.stages.outcome import Outcome


def judge(case: Case, inputs: Inputs, backend: Backend, *, sharing: int = 1) -> Outcome:
    """The outcome of a case. `sharing`: number of cases of the run that share its false alarms.

    Raises BackendError and Unsupported, as the backend does.
    """
    from narrowgauge.harness.checks.statistics.decision import decide
    from narrowgauge.harness.operations.registry import JUDGES

    outcome = JUDGES[case.operation](case, inputs, backend)
    decide(outcome.stages, sharing)
    return outcome


def explained(outcome: Outcome, backend: Backend) -> list[dict[str, Any]]:
    """What explains a wrong outcome of `backend`. A diagnosis that fails costs itself, not the verdict."""
    from narrowgauge.harness.diagnosis.explain import explain
    from narrowgauge.harness.diagnosis.search_history import history_of

    try:
        return [explanation.to_dict() for explanation in explain(outcome, history_of(backend))]
    except Exception as error:
        words = f"no diagnosis: {type(error).__name__}: {error}{error_location(error)}"
        return [{"cause": "no-diagnosis", "sentence": words, "stage": "", "exact": False}]
