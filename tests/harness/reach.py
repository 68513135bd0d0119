"""How far the report reaches: many records to tables, page, summary and gate, timed. `python -m tests.harness.reach`

Prints a row for each step: seconds by the clock and of a core, and megabytes of its files. No time is a failure: a
shared machine varies.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.records.journal import Journal, new_run
from narrowgauge.harness.records.record import new_record
from narrowgauge.harness.report.page.records_json import TIMES
from narrowgauge.harness.report.report import print_summary, write
from tests.matrix import quick_cases

RECORDS = 20_000
FAILING = 10
"""Number of records for each failing record."""
SENTENCE = "70 301 of 262 144 codes differ, each by 1 step, the first at row {row}, column 2"


def many_records(count: int) -> Iterator[dict[str, Any]]:
    """Records of the quick tier, repeated with further ids up to this number: with the stages of each
    operation, figures of a gemm, and the findings of failing cases. The same records every time."""
    cases = _cases()
    for number, case in enumerate(islice(cycle(cases), count)):
        record = new_record(case, backend="native", device="cpu", seed=0)
        if again := number // len(cases):
            record.case = f"{record.case}+{again}" if record.flags else f"{record.case}/{again}"
            record.flags = "+".join(filter(None, [record.flags, str(again)]))
        names = ("memory", "repeat", *case.stages())
        record.stages = [
            {
                "stage": name, "rule": "exact", "compared": 262144 + number, "mismatches": 0, "max_ulp": None,
                "excused": 0, "unbounded": None, "sentence": "",
            }
            for name in names
        ]  # fmt: skip
        record.compared = sum(stage["compared"] for stage in record.stages)
        record.allclose, record.sqnr_db, record.sweep = True, float("inf"), [1.0] * 6
        record.seconds = 1e-3 + number % 97 / 977
        for place, part in enumerate(TIMES):
            setattr(record, f"seconds_{part}", 1e-5 * (1 + (place + 7919) * number % 99_991))
        record.input_digest, record.output_digest = f"{number:016x}", f"{7919 * number:016x}"
        if record.operation.startswith("gemm"):
            record.stages[-1]["rule"], outputs = "bound", record.stages[-1]["compared"]
            record.exact_share, record.ordered_share = (outputs // 4) / outputs, (outputs // 2) / outputs
            record.budget_max, record.budget_p99 = 0.3, 0.2
            record.budget_histogram = [number, 5, 3, 2, 1, 1, 0, 0, 0, 0, 0]
        if number % FAILING == 1:
            _fail(record, number)
        yield record.to_dict()


@cache
def _cases() -> list[Case]:
    return list(quick_cases())


def _fail(record: Any, number: int) -> None:
    record.stages[-1] |= {"mismatches": 70_301, "max_ulp": 1, "sentence": SENTENCE.format(row=number % 64)}
    record.verdict, record.stage = "fail", record.stages[-1]["stage"]
    record.mismatches, record.max_ulp = 70_301, 1
    record.message = f"{record.stage}: {SENTENCE.format(row=number % 64)}"
    element = {
        "row": number % 64, "column": 2, "block": 0, "column_in_block": 2, "input": -21474836480.0,
        "input_bits": "0xD0A0",
        "scaled": -5.0, "scale": 56.0, "scale_bits": "0b01100110", "expected": -4.0, "expected_bits": "0b1110",
        "actual": -6.0, "actual_bits": "0b1111", "distance": "1 step",
    }  # fmt: skip
    record.findings = [
        {
            "stage": record.stage, "rule": "exact", "sentence": SENTENCE.format(row=number % 64),
            "elements": [{"which": which, **element} for which in ("first", "worst")],
            "modulo": {
                axis: {str(n): [(number + k) % 9 for k in range(n)] for n in (16, 32, 128)}
                for axis in ("row", "column")
            },
            "heat": {"rows": 16, "columns": 16, "counts": [[(number * k) % 20 for k in range(64)] for _ in range(16)]},
            "steps": [], "census": {}, "table": {},
        }
    ]  # fmt: skip


Times = tuple[float, float]
"""Seconds by the clock, and of a core."""


def measure(count: int, directory: Path) -> Iterator[tuple[str, Times | None, Path | None]]:
    """Each step after a run, its times, and its file."""
    from narrowgauge.harness.gate.baseline import baseline_of
    from narrowgauge.harness.gate.baseline import read as read_baseline
    from narrowgauge.harness.gate.baseline import write as write_baseline
    from narrowgauge.harness.gate.gate import judge
    from narrowgauge.harness.gate.trust import read_trusted

    def timed(call: Callable[[], Any]) -> tuple[Any, Times]:
        started, used = time.perf_counter(), time.process_time()
        return call(), (time.perf_counter() - started, time.process_time() - used)

    def journal() -> None:
        written = Journal(directory, lambda: run)
        for record in records:
            written.add(record)
        written.close()

    records = list(many_records(count))
    run = new_run([record["case"] for record in records], backend="native", device="cpu", seed=0)
    yield "journal", timed(journal)[1], directory / "records.jsonl"
    page, seconds = timed(lambda: write(records, run.environment, directory, elapsed=None))
    yield "report and tables", seconds, page
    console = Console(file=(directory / "terminal").open("w", encoding="utf-8"))
    yield "summary in the terminal", timed(lambda: print_summary(records, console))[1], None
    console.file.close()
    del records[:]  # the gate is a command of its own
    found, seconds = timed(lambda: read_trusted(directory))
    yield "journal read", seconds, None
    baseline = directory / "baseline.json"
    write_baseline(baseline_of(found), baseline)
    yield "gate", timed(lambda: judge(found, read_baseline(baseline)))[1], baseline
    for name in ("records.parquet", "records.csv", "summary.md"):
        yield name, None, directory / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=RECORDS)
    table = Table("", "s", "of a core", "MB", box=None)
    all_times: list[Times] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, times, path in measure(parser.parse_args().records, Path(folder)):
            all_times += [times] if times else []
            size = f"{path.stat().st_size / 1e6:.2f}" if path else ""
            table.add_row(name, *(f"{seconds:.2f}" for seconds in times or ()), *([] if times else ["", ""]), size)
    table.add_row("together", *(f"{sum(column):.2f}" for column in zip(*all_times, strict=True)))
    Console().print(table)


if __name__ == "__main__":
    main()
