"""What `narrowgauge show` prints of a product: the row of an output."""

from __future__ import annotations

from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.output import rule_at
from narrowgauge.harness.operations.stages.table import Ends, Place, Table, bounded_table


def output_table(_: Inputs, outcome: Outcome, place: Place | None) -> Table | None:
    """The outputs of a row with their bounds."""
    limits = outcome.limits
    assert limits is not None

    def describe(here: Place) -> tuple[str, Ends | None]:
        return rule_at(limits, here), None if limits.exact[here] else (limits.lower[here], limits.upper[here])

    return bounded_table(outcome, place, limits.expected, "rule", describe)
