"""Properties of a case in JUnit's XML, as `pytest --junitxml` writes it. reports/SCHEMA.md says what each means."""

from __future__ import annotations

from typing import Any

import pytest

from narrowgauge.harness.report import text

PROPERTIES = {
    "verdict": "verdict", "stage": "stage", "compared": "compared", "mismatches": "mismatches", "recipe": "recipe",
    "shape": "shape", "dtype": "dtype", "max_ulp": "max_ulp", "budget": "budget_max", "known": "known",
}  # fmt: skip
"""Property → column of the record."""


def properties(record: dict[str, Any]) -> list[tuple[str, str]]:
    """The properties of a case: what `PROPERTIES` names, and `explanation`. What was not measured is empty."""
    named = [(name, "" if record[column] is None else str(record[column])) for name, column in PROPERTIES.items()]
    return [*named, ("explanation", text.explanation(next(iter(record["explanations"]), None)))]


def add_properties(config: pytest.Config, report: pytest.TestReport, record: dict[str, Any]) -> None:
    """Add the properties of a case whose worker died: pytest adds those of a report that has a teardown alone."""
    from _pytest.junitxml import xml_key

    if (xml := config.stash.get(xml_key, None)) is not None:
        reporter = xml.node_reporter(report)
        for name, value in properties(record):
            reporter.add_property(name, value)
