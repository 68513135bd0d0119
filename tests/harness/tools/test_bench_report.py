"""What a bench says: its table, its page with the roofline, its files; and the options of the command."""

from __future__ import annotations

import io
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from narrowgauge.harness import cli
from narrowgauge.harness.tools.bench import run_bench
from narrowgauge.harness.tools.bench.bench import Bench
from narrowgauge.harness.tools.bench.bench_row import COLUMNS, SCHEMA, BenchRow
from narrowgauge.harness.tools.bench.cost_growth import CostCurve, CostPoint
from narrowgauge.harness.tools.bench.report import cells, report, table
from narrowgauge.harness.tools.bench.tasks import BenchTask
from tests.harness.pages import LOOKS, needs_axe, violations
from tests.paths import ROOT

NASTY = """<script>alert(1)</script>&"'"""


def row(who: str = "native", **columns: Any) -> BenchRow:
    keys = {
        "seconds": 2e-3, "seconds_min": 1.9e-3, "seconds_q1": 1.95e-3, "seconds_q3": 2.05e-3, "seconds_max": 2.5e-3,
        "rounds": 9, "calls": 1, "elements": 1 << 28, "moved": 6 * 10**9, "flop": 2 << 28, "ceiling": "copy",
        "ceiling_rate": 4e12, "share": 0.75, "speedup": 25.0, "verdict": "pass", "compared": 1 << 28, "judged": "bytes",
    }  # fmt: skip
    device = columns.pop("device", "cuda")
    return BenchRow("quantize", "nvfp4", "rowwise", "16384x16384", "bf16", who, device, **{**keys, **columns})


def product(**columns: Any) -> BenchRow:
    keys = {
        "operation": "gemm", "variant": "", "shape": "8192x8192x8192", "seconds": 2e-3, "moved": 2 * 10**8,
        "flop": 2 * 8192**3, "ceiling": "matmul", "share": 0.7, "judged": "order",
        "second_ceiling": "dequantize + matmul", "second_share": 1.3,
    }  # fmt: skip
    result = row()
    for name, value in {**keys, **columns}.items():
        setattr(result, name, value)
    return result


COPY = row("copy", verdict="unjudged", moved=4 * 10**9, seconds=1e-3, share=None, speedup=None, ceiling="")
MATMUL = product(who="matmul", verdict="unjudged", seconds=1.4e-3, share=None, second_share=None, ceiling="")
REFERENCE = row("reference", verdict="unjudged", seconds=50e-3, share=0.03, speedup=1.0)


def bench(*rows: BenchRow) -> Bench:
    return Bench(list(rows or (COPY, row(), REFERENCE, MATMUL, product())), {"torchao": "not installed (no torchao)"})


def wrong() -> BenchRow:
    return row("torchao", verdict="fail", message=f"codes: 3 bytes {NASTY}", mismatches=3)


def printed(result: Bench, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding) as file:
        table.print_bench(result, Console(file=file))
        file.flush()
        return raw.getvalue().decode(encoding)


def test_a_bench_in_one_sentence() -> None:
    output = cells.sentence(bench().rows)
    assert output == "2 timed outputs right, 536 870 912 elements compared"
    assert cells.sentence([row(), row(verdict="fail"), wrong()]) == "1 of 2 timed outputs did not pass"
    output = cells.sentence([row(), wrong(), row("torch._scaled_mm")])
    assert output.startswith("1 timed output right, 268 435 456 elements compared")
    assert output.endswith("; 1 of 2 outputs of peers wrong")
    assert cells.sentence([COPY]) == "nothing was judged"


# Words.


def test_the_table_names_wrong_outputs_and_missing_peers() -> None:
    output = printed(bench(COPY, row(), product(), wrong()))
    lines = output.splitlines()
    table_lines = [" ".join(line.split()) for line in lines]
    assert "quantize nvfp4 rowwise 16384x16384 native 2 ms −5 +25 % 3 TB/s 75 % 25 ✓ bytes" in table_lines
    assert "gemm nvfp4 8192x8192x8192 native 2 ms −5 +25 % 550 TFLOP/s 70 % (130 %) 25 ✓ order" in table_lines
    assert f"quantize/nvfp4/rowwise/16384x16384/torchao: codes: 3 bytes {NASTY}" in lines
    assert lines[-1] == "torchao: not installed (no torchao)"


# Figures.


# Files.


def test_the_page_has_everything_and_escapes_it(tmp_path: Path) -> None:
    result = bench(COPY, row(), MATMUL, product(), wrong())
    page = report.write(result, [CostCurve("native", [CostPoint(22, 1.0, 4)])], {"GPU": NASTY}, tmp_path)
    html = page.read_text(encoding="utf-8")
    assert NASTY not in html
    assert html.count("&lt;script&gt;") >= 2
    assert "<h2>Roofline</h2>" in html
    assert "<h2>Time</h2>" in html
    assert "native, from 2^22: too few large sizes" in html
    assert "<h2>Memory</h2>" in html
    assert html.count("<circle") == 3 + 2
    title = re.search("<title>.*</title>", html).group()  # type: ignore[union-attr]
    assert "✓" in title
    assert "1 of 1 output of peers wrong" in title
    assert "torchao: not installed (no torchao)" in html
    assert html.count("<tr") == 6


@needs_axe
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_accessibility(width: int, dark: bool, tmp_path: Path) -> None:
    growths = [CostCurve("native", [CostPoint(n, 2.0**n, 4**n) for n in (20, 21, 22)])]
    page = report.write(bench(COPY, row(), MATMUL, product(), wrong()), growths, {"GPU": NASTY}, tmp_path)
    assert violations(page, tmp_path, width, dark=dark) == ("", [])


def test_the_tables_have_every_column_and_row(tmp_path: Path) -> None:
    report.write(bench(), [CostCurve("native", [CostPoint(22, 1.0, 5)])], {"GPU": "none"}, tmp_path)
    read = pq.read_table(tmp_path / "bench.parquet")
    assert tuple(read.column_names) == COLUMNS
    assert read.schema.metadata[b"narrowgauge_bench_schema"] == str(SCHEMA).encode()
    rows = read.to_pylist()
    assert rows == [row.to_dict() for row in bench().rows]
    assert rows[1]["rate"] == pytest.approx(3e12)
    assert rows[0]["share"] is None
    content = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert content["rows"] == rows
    assert content["growth"][0]["points"] == [{"exponent": 22, "seconds": 1.0, "memory": 5}]
    assert content["notes"] == bench().notes
    assert content["environment"] == {"GPU": "none"}


def test_every_column_is_documented() -> None:
    schema = (ROOT / "docs" / "schema.md").read_text(encoding="utf-8")
    section = schema.partition("## Tables of a bench")[2]
    documented = re.findall(r"^\| `(\w+)` \| (\w+)", section, re.MULTILINE)
    assert [name for name, _ in documented] == list(COLUMNS)
    kinds = {"str": "string", "int": "int64", "float | None": "double", "bool | None": "bool"}
    types = {field.name: kinds[str(field.type)] for field in fields(BenchRow)}
    assert dict(documented) == {"schema": "int64", "id": "string", **types, "rate": "double"}


POINTS = [CostPoint(22, 1.0, 4)]


@pytest.mark.parametrize(
    ("result", "growths", "verdict"),
    [
        (bench(), [], "pass"),
        (bench(row(), wrong()), [], "pass"),
        (bench(row(), product(verdict="fail")), [], "fail"),
        (bench(wrong()), [], "fail"),
        (bench(COPY), [], "fail"),
        (Bench(), [], "fail"),
        (Bench(), [CostCurve("native", POINTS)], "pass"),
        (Bench(), [CostCurve("native", POINTS, "wrong", wrong=True)], "fail"),
        (Bench(), [CostCurve("native", [], "raises")], "fail"),
    ],
)
def test_the_verdict_of_a_bench(result: Bench, growths: list[CostCurve], verdict: str) -> None:
    assert report.verdict_of(result, growths) == verdict


# The command.


def command(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["bench", *arguments])


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of the sessions. A session finds nothing wrong, except in the folder `wrong`."""
    result: list[dict[str, Any]] = []

    def rates(tasks: Any, device: str, out: Path, **options: Any) -> bool:
        result.append({"tasks": [task.id for task in tasks], "device": device, "out": out, **options})
        return out.name != "wrong"

    def growth(device: str, out: Path) -> bool:
        result.append({"growth": device, "out": out})
        return out.name != "wrong"

    monkeypatch.setattr(run_bench, "run_rates", rates)
    monkeypatch.setattr(run_bench, "run_growth", growth)
    return result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "12"], "a size is MxK of a matrix or MxKxN of a product, not '12'"),
        (["-k", "("], "cannot read the keyword expression '('"),
        (["-k", "nothing"], "nothing is selected by -k 'nothing'"),
        (["--growth", "--quick"], "--growth has shapes and operations of its own; -k, --shape, --quick and --compile"),
        (["--growth", "-k", "gemm"], "--growth has shapes and operations of its own"),
    ],
)
def test_what_does_not_go_together_is_refused(
    asked_for: list[dict[str, Any]], arguments: list[str], message: str
) -> None:
    result = command(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not asked_for


def test_a_session_measures_prints_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: dict[str, Any] = {}

    def measure(tasks: Any, device: str, *, on_task: Any, **options: Any) -> Bench:
        on_task("one")
        on_task("two")
        heard.update(options)
        return bench()

    def grow(device: str, *, last: int | None, on_size: Any) -> list[CostCurve]:
        on_size("2^16 elements")
        heard["last"] = last
        return [CostCurve("native", POINTS)]

    monkeypatch.setattr(run_bench, "measure", measure)
    monkeypatch.setattr(run_bench, "measure_growth", grow)
    console = Console(file=io.StringIO(), width=200)
    chosen = [BenchTask("swizzle", "", "", (128, 128))]
    assert run_bench.run_rates(chosen, "cpu", tmp_path, quick=True, compiling=True, launches=True, console=console)
    assert heard == {"quick": True, "compiling": True, "launches": True}
    assert (tmp_path / "bench.parquet").is_file()
    assert run_bench.run_growth("cpu", tmp_path, last=18, console=console)
    assert heard["last"] == 18
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 timed outputs right" in output
    assert re.search("two .* 2/2 ", output), "what runs, and that it is done"
    assert f"report: {tmp_path / 'index.html'}" in output
