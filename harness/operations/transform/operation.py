"""The operation transform."""

from __future__ import annotations

from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.operation import Operation
from narrowgauge.harness.operations.quantize.inputs import transform_inputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.table import Ends, Place, Table, bounded_table
from narrowgauge.harness.operations.transform.case import TransformCase
from narrowgauge.harness.operations.transform.judge import judge_transform


def rotated_table(inputs: Inputs, outcome: Outcome, place: Place | None) -> Table | None:
    """The row of an element before and after the rotation."""
    expected, ends = outcome.expected, outcome.ends
    assert expected is not None

    def describe(here: Place) -> tuple[str, Ends | None]:
        return str(float(inputs.x[here])), None if ends is None else (ends[0][here], ends[1][here])

    return bounded_table(outcome, place, expected, "x", describe)


OPERATION = Operation(case=TransformCase, inputs=transform_inputs, judge=judge_transform, show=rotated_table)
