"""Findings in a terminal and in Markdown, beside the elements: distances in steps, and special values."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from narrowgauge.harness.checks import finding
from narrowgauge.harness.checks.distance import Comparison
from narrowgauge.harness.report.failure_view import (
    SPECIAL,
    distribution_lines,
    explanation_lines,
    first_failure,
    step_counts,
)
from narrowgauge.harness.report.page.failure import failure
from narrowgauge.harness.report.text import explanation
from narrowgauge.harness.tools.run_cases import print_result
from tests.harness.runs import record

STEPS = [[-2, -2, 1], [-1, -1, 3512], [0, 0, 90], [1, 1, 0], [2, 2, 0], [3, 4, 7]]
CENSUS = {"expected": {"nan": 3, "negative_zero": 12}, "actual": {"nan": 0, "negative_zero": 12}}
LINES = [
    "actual minus expected, in steps: 1 at -2, 3 512 at -1, 90 at 0, 7 at +3 to +4",
    "special values, expected → actual: NaN 3 → 0, −0 12",
]


def found(stage: str = "codes", **changes: Any) -> dict[str, Any]:
    given = {"elements": [{"which": "first", "row": 3}], "modulo": {}, "heat": {}, "steps": STEPS, "census": CENSUS}
    return {"stage": stage, "rule": "exact", "sentence": "37 codes differ", **given, **changes}


def failing(*findings: dict[str, Any]) -> dict[str, Any]:
    given = {"verdict": "fail", "stage": "codes", "message": "codes: 37 codes differ", "mismatches": 37}
    return record("ties", findings=list(findings), **given)


def test_a_terminal_shows_steps_and_census_behind_the_elements() -> None:
    lines = first_failure(failing(found(), found("values", census={}))).splitlines()
    assert lines[3:7] == [
        "codes (equal bytes): 37 codes differ",
        "  element  first",
        "  row          3",
        f"  {LINES[0]}",
    ]
    assert lines[7] == f"  {LINES[1]}"
    assert lines[-3] == f"  {LINES[0]}"
    assert sum(line.startswith("  special values") for line in lines) == 1


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ([4469, 4326, 4430, 4353] * 4, False),  # elements at random places
        ([5] * 16, False),
        ([0] * 7 + [2] + [0] * 8, False),
        ([0] * 16, False),
        ([0] * 4 + [9] * 4 + [0] * 8, True),
        ([1000] * 15 + [1400], True),
        ([0] * 7 + [40] + [0] * 8, True),
    ],
)
def test_counts_are_shown_only_if_they_are_uneven(counts: list[int], shown: bool) -> None:
    wrong = failing(found(modulo={"row": {"16": counts}}))
    assert ("  by row modulo 16: " in first_failure(wrong)) is shown
    assert bool(failure(wrong, [])["findings"][0]["modulo"]["row"]) is shown


def test_a_terminal_of_80_columns_breaks_sentences_between_words() -> None:
    census = {"expected": dict.fromkeys(SPECIAL, 10_000), "actual": dict.fromkeys(SPECIAL, 20_000)}
    wide = found(elements=[{"which": "first", "input": "1" * 40}, {"which": "worst", "input": "2" * 40}], census=census)
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    print_result([failing(wide), failing(wide)], console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert "The worst of 2 failures:" in lines
    long = [line for line in lines if len(line) > 80]
    assert {line.split()[0] for line in long} <= {"reproduce:", "narrowgauge", "element", "input"}
    assert any(line.split() == ["input", "1" * 40, "2" * 40] for line in long)  # a row of elements is a line
    assert "saturated 10 000 → 20 000, subnormal 10 000 → 20 000" in " ".join(map(str.strip, lines))


def test_more_than_64_steps_are_one_count() -> None:
    steps = [[-(1 << 31), -(1 << 30) - 1, 5], [-128, -65, 2], [-64, -33, 1], [0, 0, 9], [65, 128, 4]]
    assert step_counts(steps) == [
        (-65, "below -64", 7), (-64, "-64 to -33", 1), (0, "0", 9), (65, "above +64", 4),
    ]  # fmt: skip
    wrong = failing(found(steps=steps))
    assert "actual minus expected, in steps: 7 below -64, 1 at -64 to -33, 9 at 0, 4 above +64" in first_failure(wrong)
    assert failure(wrong, [])["findings"][0]["steps"] == step_counts(steps)


def test_what_a_finding_counts_has_a_name() -> None:
    """Of a finding of the harness."""
    expected = torch.tensor([[0.0, 1.0, float("nan")]])
    actual = torch.tensor([[-0.0, 1.0, 2.0]])
    made = {"steps": finding.histogram(Comparison(expected, actual))}
    made["census"] = finding.census(Comparison(expected, actual))
    assert distribution_lines(made) == [
        "actual minus expected, in steps: 2 at 0",
        "special values, expected → actual: NaN 1 → 0, −0 0 → 1",
    ]
    assert tuple(SPECIAL) == finding.SPECIAL_VALUES


@pytest.mark.parametrize("cause", ["state-between-calls", "passes-alone"])
def test_earlier_cases_come_before_other_causes(cause: str) -> None:
    exact = {"cause": "ties-away", "sentence": "ties round away", "stage": "codes", "exact": True}
    state = {"cause": cause, "sentence": "only after other cases: a", "stage": "codes", "exact": False}
    assert explanation_lines([state, exact]) == ["only after other cases: a", "explained exactly by: ties round away"]
    assert explanation(state) == "only after other cases: a"


def test_causes_are_printed_by_what_they_prove() -> None:
    exact = [{"cause": f"c{i}", "sentence": f"mistake {i}", "stage": "codes", "exact": True} for i in range(4)]
    part = {
        "cause": "ties-away",
        "sentence": "ties; explains 93 % of the wrong elements",
        "stage": "codes",
        "exact": False,
    }
    place = {"cause": "place:last-row", "sentence": "only in the last row", "stage": "codes", "exact": False}
    assert explanation_lines([*exact[:2], place]) == [
        "explained by one of: mistake 0", "                 or: mistake 1", "wrong elements: only in the last row",
    ]  # fmt: skip
    lines = explanation_lines([*exact, place])
    assert lines[:2] == [
        "explained by one of: mistake 0",
        "                 or: 3 less simple causes with the same bytes",
    ]
    assert len(explanation_lines([*exact, place], every=True)) == len(exact) + 1
    assert explanation_lines([part]) == ["possible cause: ties; explains 93 % of the wrong elements"]
