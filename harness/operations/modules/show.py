"""What `narrowgauge show` prints of a module."""

from __future__ import annotations

from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.table import Place, Table


def accuracy_table(_: Inputs, outcome: Outcome, __: Place | None) -> Table:
    """Accuracy cost of quantizing a module, which has no single element to show."""
    table = Table("beside float64, of the last step", ("tensor", "SQNR, dB", "relative error", "cosine"))
    for entry in outcome.accuracy:
        figures = (entry[name] for name in ("sqnr_db", "relative_error", "cosine"))
        table.add_row(entry["tensor"], *("" if figure is None else f"{figure:.4g}" for figure in figures))
    return table
