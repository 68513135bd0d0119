"""Times: the phase of each second of a case, and their table in every report."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.machine.timing import OTHER, PHASES, count_seconds, stopwatch, timed_function
from narrowgauge.harness.records.record import Record
from narrowgauge.harness.report import markdown, times
from narrowgauge.harness.report.page import page
from narrowgauge.harness.report.report import print_summary
from narrowgauge.harness.running.runner import run_case
from tests.harness.sample_backends import backend, quantize

CASE = case_from_labels("quantize", "nvfp4", (16, 32), "bf16", "normal")


class Clock:
    """A clock moved by `work`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    result = Clock()
    monkeypatch.setattr("narrowgauge.harness.machine.timing.time", result)
    return result


def test_each_second_is_of_one_part(clock: Clock) -> None:
    with stopwatch("cpu") as watch:
        clock.work(1)
        with count_seconds("inputs"):
            clock.work(2)
        with count_seconds("checks"):
            clock.work(4)
            timed_function("reference", clock.work)(8)
            with count_seconds("backend"):
                clock.work(16)
                timed_function("reference", clock.work)(32)  # a backend made of the reference
            clock.work(64)
        with count_seconds("diagnosis"):
            timed_function("reference", clock.work)(128)
            with count_seconds("checks"):
                clock.work(256)
        clock.work(512)
    assert watch.seconds == {
        "inputs": 2, "backend": 48, "reference": 8, "checks": 68, "diagnosis": 384, OTHER: 513,
    }  # fmt: skip


def test_a_record_says_where_its_time_went() -> None:
    def slow(q):
        time.sleep(0.05)
        q.codes[2, 3] ^= 0x10

    record = run_case(CASE, backend(quantize=quantize(slow)))
    spent = {part: getattr(record, f"seconds_{part}") for part in PHASES}
    assert record.verdict == "fail"
    assert all(spent.values())
    assert spent["backend"] >= 0.1  # each of two runs
    assert 0.1 <= sum(spent.values()) <= record.seconds_total
    assert record.seconds_core is not None
    assert record.bytes_peak is None  # of a GPU alone


def record(name: str, operation: str, recipe: str, **seconds: float) -> dict:
    result = Record(name, "", operation, recipe, "1x1", "", "", "", "", "native", "cpu", 0)
    for part in (*PHASES, "total", "core"):
        setattr(result, f"seconds_{part}", seconds.get(part, 0.0))
    return result.to_dict()


RECORDS = [
    record("a", "gemm", "nvfp4", inputs=1, backend=2, reference=8, checks=3, total=16, core=30),
    record("b", "quantize", "nvfp4-2d", checks=4, total=5, core=5),
    record("c", "quantize", "nvfp4-rht", checks=5, diagnosis=1, total=7, core=7),
    record("d", "quantize", "mxfp8-e4m3", backend=2, total=2, core=1),
    Record("e", "", "gemm", "nvfp4", "1x1", "", "", "", "", "native", "cpu", 0, verdict="crash").to_dict(),
]


def test_rows_are_sums_and_the_longest_comes_first() -> None:
    result = [(row.operation, row.recipe, row.cases, row.seconds) for row in times.rows(RECORDS)]
    assert result == [
        ("all", "", 4, (30, 1, 4, 8, 12, 1, 4, 43)),
        ("gemm", "", 1, (16, 1, 2, 8, 3, 0, 2, 30)),
        ("quantize", "", 3, (14, 0, 2, 0, 9, 1, 2, 13)),
    ]


def test_every_report_has_the_table() -> None:
    out = io.StringIO()
    print_summary(RECORDS, Console(file=out, width=80), details=True)
    terminal = [line.split() for line in out.getvalue().splitlines()]
    assert ["operation", "cases", "all", "inputs"] in [line[:4] for line in terminal]
    assert ["all", "4", "30", "1", "4", "8", "12", "1", "4", "43"] in terminal
    assert ["16", "s,", "reference", "50", "%:", "a"] in terminal
    summary = markdown.render(RECORDS, {}, 1.0)
    assert "| quantize | nvfp4 (2) | 2 | 12 s |  |  |  | 9 s | 1 s | 2 s | 12 s |" in summary
    assert "| `c` | 7 s |  |  |  | 5 s | 1 s | 1 s | 7 s |" in summary
    html = page.render(RECORDS, {}, 1.0)
    assert (
        '<th scope="row">quantize</th><td>nvfp4 (2)</td><td class="number">2</td><td class="number">12 s</td>' in html
    )
    assert '<td class="case"><a href="#case=a">a</a></td><td class="number">16 s</td>' in html
    nothing = page.render(RECORDS[4:], {}, 1.0) + markdown.render(RECORDS[4:], {}, 1.0)
    assert times.NOTE not in nothing
