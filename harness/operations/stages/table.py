"""Tables of elements: what `narrowgauge show` prints of an outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from narrowgauge.harness.checks.finding import float_view
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.stages.outcome import Outcome

Place = tuple[int, int]
"""Row and column."""
NEIGHBOURS = 8
"""Shown elements of a row without blocks."""
Ends = tuple[torch.Tensor, torch.Tensor]
"""Least and greatest right number of an element."""


class Table:
    """Elements in columns. The first row has the headings; a column without a heading has the bits of the value before
    it."""

    def __init__(self, title: str, headings: Sequence[str]) -> None:
        self.title = title
        self.rows = [(list(headings), "dim")]

    def add_row(self, *cells: str, style: str = "") -> None:
        """Add a row. `style`: of rich."""
        self.rows.append((list(cells), style))

    def plain(self) -> dict[str, Any]:
        """The table as data: title, rows, headings first, and the places of the rows whose numbers are different."""
        different = [place for place, (_, style) in enumerate(self.rows) if "bold" in style]
        return {"title": self.title, "rows": [cells for cells, _ in self.rows], "different": different}

    def add_element(
        self,
        place: Place,
        first: Sequence[str],
        expected: torch.Tensor,
        ends: Ends | None,
        actual: torch.Tensor,
    ) -> None:
        """Add the element of a column: the cells `first`, the expected number, its least and greatest right number if
        there are several, and the number of the kernel."""
        expected_value, actual_value = float_view(expected), float_view(actual)
        lower, upper = ("", "") if ends is None else (str(float(end)) for end in ends)
        cells = [str(place[1]), *first, str(expected_value[0]), expected_value[1], lower, upper]
        cells += [str(actual_value[0]), actual_value[1]]
        self.add_row(*cells, style="" if expected_value == actual_value else "bold")


def wrong_element(outcome: Outcome, stage: str) -> dict[str, Any] | None:
    """First wrong element of a stage."""
    for result in outcome.stages:
        if result.stage == stage and result.finding is not None:
            element: dict[str, Any] = result.finding["elements"][0]
            return element
    return None


def place_in(outcome: Outcome, stage: str, place: Place | None, shape: Sequence[int]) -> Place:
    """Place to show: the given place limited to the matrix, else the stage's first wrong element, else (0, 0)."""
    if place is not None:
        return min(place[0], shape[0] - 1), min(place[1], shape[1] - 1)
    element = wrong_element(outcome, stage)
    return (0, 0) if element is None else (element["row"], element["column"])


def neighbours(row: int, column: int, matrix: torch.Tensor) -> list[Place]:
    """Places of the elements that are shown with an element of a row without blocks."""
    start = column // NEIGHBOURS * NEIGHBOURS
    return [(row, c) for c in range(start, min(start + NEIGHBOURS, matrix.shape[1]))]


def bounded_table(
    outcome: Outcome,
    place: Place | None,
    expected: torch.Tensor,
    heading: str,
    describe: Callable[[Place], tuple[str, Ends | None]],
) -> Table | None:
    """A row of the kernel's output beside the expected numbers. None if the output is empty.

    `describe`: of an element, the text under the heading, and its ends if it has several right numbers.
    """
    output = outcome.actual
    assert output is not None
    if not output.numel():
        return None
    row, column = place_in(outcome, "output", place, output.shape)
    table = Table(f"row {row}", ("column", heading, "expected", "", "lower", "upper", "actual", ""))
    for neighbour in neighbours(row, column, output):
        text, ends = describe(neighbour)
        table.add_element(neighbour, [text], expected[neighbour], ends, output[neighbour])
    return table


def compared_table(inputs: Inputs, outcome: Outcome, place: Place | None) -> Table | None:
    """A row of the kernel's and of the expected result, of the first wrong stage or of the first result."""
    actual, expected = outcome.actual, outcome.expected
    if actual is None or expected is None or not actual.numel():
        return None
    stage = next((stage.stage for stage in outcome.stages if not stage.passed), "")
    columns = actual.shape[-1] if actual.dim() > 1 else 1
    one, other = (tensor.reshape(-1, columns) for tensor in (actual, expected))
    row, column = place_in(outcome, stage, place, one.shape)
    table = Table(f"row {row}", ("column", "expected", "", "actual", ""))
    for _, k in neighbours(row, column, one):
        views = [str(part) for tensor in (other, one) for part in float_view(tensor[row, k])]
        table.add_row(str(k), *views, style="" if views[:2] == views[2:] else "bold red")
    return table
