"""What `narrowgauge show` prints of a product: the row of an output."""

from __future__ import annotations

from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.output import rule_at
from narrowgauge.harness.operations.stages.table import Place, Table, neighbours, place_in


def output_table(_: Inputs, outcome: Outcome, place: Place | None) -> Table | None:
    """The outputs of a row with their bounds."""
    output, limits = outcome.actual, outcome.limits
    assert output is not None
    assert limits is not None
    if not output.numel():
        return None
    row, column = place_in(outcome, "output", place, output.shape)
    table = Table(f"row {row}", ("column", "rule", "expected", "", "lower", "upper", "actual", ""))
    for neighbour in neighbours(row, column, output):
        exact = bool(limits.exact[neighbour])
        ends = None if exact else (limits.lower[neighbour], limits.upper[neighbour])
        table.add_element(neighbour, [rule_at(limits, neighbour)], limits.expected[neighbour], ends, output[neighbour])
    return table
