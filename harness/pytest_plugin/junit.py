"""Properties of a case in JUnit XML (`pytest --junitxml`). See docs/schema.md."""

from __future__ import annotations

from typing import Any

import pytest

from narrowgauge.harness.report.failure_view import explanation_lines

PROPERTIES = {
    "verdict": "verdict", "stage": "stage", "compared": "compared", "mismatches": "mismatches", "recipe": "recipe",
    "shape": "shape", "dtype": "dtype", "max_ulp": "max_ulp", "budget": "budget_max", "known": "known",
}  # fmt: skip
"""Column of the record by property."""


def properties(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Properties of a case: `PROPERTIES` and `explanation`. A value that was not measured is empty."""
    values = [(name, "" if record[column] is None else str(record[column])) for name, column in PROPERTIES.items()]
    return [*values, ("explanation", next(iter(explanation_lines(record["explanations"])), ""))]


def add_properties(config: pytest.Config, report: pytest.TestReport, record: dict[str, Any]) -> None:
    """Add the properties of a case whose worker died. pytest itself adds them only with a teardown report."""
    from _pytest.junitxml import xml_key

    if (xml := config.stash.get(xml_key, None)) is not None:
        reporter = xml.node_reporter(report)
        for name, value in properties(record):
            reporter.add_property(name, value)
