"""Accuracy cost of each recipe: modules under a recipe against high precision. Verdicts do not depend on accuracy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from narrowgauge.harness.report import text

TITLE = "What each recipe costs in accuracy"
NOTE = (
    "For information, and in no verdict: medians over the cases of a module under a recipe against float64 of the same "
    "inputs, not quantized. Relative error: Frobenius norm of the difference over that of the result."
)
TENSORS = ("y", "dx", "dw")
"""Output, gradient of the input, gradient of the weight."""
FIGURES = {"sqnr_db": "SQNR dB", "relative_error": "relative error", "cosine": "cosine"}
"""Keys of an entry in a record's `accuracy`, and their labels."""


class AccuracyRow(NamedTuple):
    """Accuracy of the cases of an operation under a training recipe."""

    recipe: str
    operation: str
    cases: int
    figures: tuple[float | None, ...]
    """Medians of `FIGURES` for all `TENSORS`; None without measurements."""

    @property
    def cells(self) -> list[str]:
        """Formatted figures, empty for figures that were not measured."""
        return [shown(figure, value) for (_, figure), value in zip(COLUMNS, self.figures, strict=True)]


COLUMNS = [(tensor, figure) for tensor in TENSORS for figure in FIGURES]
"""Tensor and figure of each entry of `AccuracyRow.figures`."""


def rows(records: Iterable[dict[str, Any]]) -> list[AccuracyRow]:
    """A row for each training recipe and operation, sorted."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        if record["accuracy"]:
            groups.setdefault((record["recipe"], record["operation"]), []).append(record)
    return [_row(recipe, operation, members) for (recipe, operation), members in sorted(groups.items())]


def _row(recipe: str, operation: str, members: list[dict[str, Any]]) -> AccuracyRow:
    entries = [entry for record in members for entry in record["accuracy"]]
    return AccuracyRow(
        recipe,
        operation,
        len(members),
        tuple(_median(entry[figure] for entry in entries if entry["tensor"] == tensor) for tensor, figure in COLUMNS),
    )


def _median(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def shown(figure: str, value: float | None) -> str:
    """A formatted figure of at most eight characters."""
    if value is None:
        return ""
    if figure == "sqnr_db":
        return f"{value:.1f}".replace("-", "−")
    if figure == "cosine":  # rounded down: 1 stands only for equal directions
        return f"{math.floor(value * 1e4) / 1e4:.4f}".replace("-", "−")
    return text.number(float(f"{value:.3g}"))
