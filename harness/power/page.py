"""The power of a test as a page."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.harness.power.result import Power
from narrowgauge.harness.report.page import template


def page(power: Power) -> str:
    """The page: a row for each known mistake, the right kernels, and the mistakes that the inputs do not show."""
    return template.render(
        Path(__file__).with_name("power.html"), name="narrowgauge power", verdict="pass" if power.passed else "fail",
        sentence=power.summary, power=power, notes=power.notes,
    )  # fmt: skip
