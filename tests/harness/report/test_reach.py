"""A report holds 20 000 records: its page is small."""

import pytest

from narrowgauge.harness.report.page import page
from tests.harness.reach import RECORDS, many_records, measure

MOST = 4_500_000
"""Bytes of the page of 20 000 records. It has 4.2 million."""


@pytest.mark.long
def test_the_page_of_20_000_records_is_below_4_5_megabytes():
    """A tenth of the records fail, each with its findings."""
    assert len(page.render(list(many_records(RECORDS)), {}, None).encode()) < MOST


def test_every_step_after_a_run_is_measured(tmp_path):
    steps = {name: path for name, _, path in measure(100, tmp_path)}
    assert {"journal", "report and tables", "gate"} <= set(steps)
    assert steps["report and tables"].stat().st_size > 100_000
