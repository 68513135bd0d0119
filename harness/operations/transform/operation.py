"""The operation transform."""

from __future__ import annotations

from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.operation import Operation
from narrowgauge.harness.operations.quantize.inputs import transform_inputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.table import Place, Table, neighbours, place_in
from narrowgauge.harness.operations.transform.case import TransformCase
from narrowgauge.harness.operations.transform.judge import judge_transform


def rotated_table(inputs: Inputs, outcome: Outcome, place: Place | None) -> Table | None:
    """The row of an element before and after the rotation."""
    output, expected = outcome.actual, outcome.expected
    assert output is not None
    assert expected is not None
    if not output.numel():
        return None
    row, column = place_in(outcome, "output", place, output.shape)
    table = Table(f"row {row}", ("column", "x", "expected", "", "lower", "upper", "actual", ""))
    for neighbour in neighbours(row, column, output):
        ends = None if outcome.ends is None else (outcome.ends[0][neighbour], outcome.ends[1][neighbour])
        table.add_element(neighbour, [str(float(inputs.x[neighbour]))], expected[neighbour], ends, output[neighbour])
    return table


OPERATION = Operation(case=TransformCase, inputs=transform_inputs, judge=judge_transform, show=rotated_table)
