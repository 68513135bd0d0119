"""The history of runs: figures over commits, and no run that fails because of its history."""

from __future__ import annotations

import multiprocessing
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowgauge.harness.cli import app
from narrowgauge.harness.records import history
from narrowgauge.harness.records.history import HistoryError, append, history_rows, update
from narrowgauge.harness.report.page.history_json import runs_json
from tests.harness.runs import GPU, product, record, run, wrong


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / history.NAME


def test_figures_of_a_run(path: Path) -> None:
    records = [record(), wrong("a", 3, max_ulp=2, sqnr_db=20.0), wrong("b", max_ulp=9), product(budget_max=0.25)]
    records += [product("x", budget_max=0.75), product("y", verdict="crash", budget_max=float("nan"), sqnr_db=None)]
    assert append(run(*records, elapsed=2.5), path) == ""
    gemm, quantize = history_rows(path)
    assert [quantize[name] for name in ("operation", "recipe", "dtype", "cases", "pass", "fail")] == [
        "quantize", "nvfp4", "bf16", 3, 1, 2,
    ]  # fmt: skip
    assert (quantize["max_ulp"], quantize["budget_max"], quantize["relative_error"]) == (9, None, 0.1)
    assert (gemm["cases"], gemm["crash"], gemm["budget_max"], gemm["relative_error"]) == (3, 1, 0.75, 0.0)
    assert (gemm["backend"], gemm["device"], gemm["tier"], gemm["seconds"]) == ("native", "cpu", "quick", 2.5)
    assert append(run(record(max_ulp=2**70), device="cuda", environment=GPU), path) == ""
    assert history_rows(path)[-1]["device"] == "NVIDIA H200"


def damaged(path: Path) -> None:
    path.write_bytes(b"no database" * 500)


def cut(path: Path) -> None:
    append(run(record()), path)
    path.write_bytes(path.read_bytes()[:5000])


def of_another_version(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE runs (a)")
        database.execute("PRAGMA user_version = 99")


def with_other_tables(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE runs (a)")
        database.execute(f"PRAGMA user_version = {history.VERSION}")


def in_no_folder(path: Path) -> None:
    path.parent.rmdir()


BROKEN = [damaged, cut, of_another_version, with_other_tables, Path.mkdir, in_no_folder]


@pytest.mark.parametrize("break_file", BROKEN, ids=lambda function: function.__name__)
def test_a_broken_file_is_a_warning_and_stays(break_file: Any, path: Path) -> None:
    break_file(path)
    before = path.read_bytes() if path.is_file() else None
    warning = append(run(record()), path)
    assert warning.count("warning") == 1
    assert str(path) in warning
    assert "--no-history" in warning
    assert (path.read_bytes() if path.is_file() else None) == before
    with pytest.raises(HistoryError, match=history.NAME):
        history_rows(path)


def _append_some(path: Path) -> None:
    for _ in range(5):
        assert append(run(record()), path) == ""


def test_runs_that_end_together_are_all_there(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append_some, args=(path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(history_rows(path)) == 20


def test_the_oldest_runs_are_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT", 3)
    for seed in range(5):
        append(run(record(), product(), seed=seed), path)
    assert [row["seed"] for row in history_rows(path)] == [2, 2, 3, 3, 4, 4]


def test_runs_of_the_page(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "DRAWN", 2)
    update(run(record(), backend="mine:Backend"), path, complete=True)
    update(run(record(tier="full")), path, complete=True)
    for seed in range(3):
        update(run(record(), wrong("a", max_ulp=3), product(budget_max=0.5), seed=seed), path, complete=True)
    warning, rows = update(run(record()), path, complete=False)
    assert (warning, [row["seed"] for row in rows]) == ("", [1, 1, 2, 2])
    _, rows = update(run(record()), path, complete=True)
    found = runs_json(rows)
    assert [one["seed"] for one in found["runs"]] == [2, 0]
    gemm, quantize = found["places"]
    assert (gemm["cases"], gemm["failed"], gemm["ulp"], gemm["budget"]) == (
        [1, None],
        [0, None],
        [0, None],
        [0.5, None],
    )
    assert (quantize["cases"], quantize["failed"], quantize["ulp"]) == ([2, 1], [1, 0], [3, 0])
    assert runs_json(rows[-1:]) == {"runs": [], "places": []}
    path.write_bytes(b"damaged" * 999)
    assert update(run(record()), path, complete=False) == ("", [])
    warning, rows = update(run(record()), path, complete=True)
    assert "warning" in warning
    assert rows == []


CASES = """
[[matrix]]
operation = "quantize"
tier = "quick"
recipe = "mxfp8-e4m3"
shape = [16, 32]
dtype = ["bf16", "fp32"]
inputs = "normal"
"""


def narrowgauge(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.long
def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(CASES)
    command = ["run", "a.toml", "--backend", "reference", "-n", 1]
    path = tmp_path / "reports" / history.NAME
    assert narrowgauge(*command, "--no-history").exit_code == 0
    assert not path.exists()
    assert narrowgauge("compare", "--history").exit_code == 2
    assert narrowgauge(*command).exit_code == 0
    assert [row["pass"] for row in history_rows(path)] == [1, 1]
    assert narrowgauge(*command, "--resume").exit_code == 0  # no case is left
    for number in (1, 2):
        assert narrowgauge(*command, "--shard", f"{number}/2", "--report-dir", f"reports/{number}").exit_code == 0
    assert len(history_rows(path)) == 2
    assert narrowgauge("merge", "reports/1", "reports/2", "--no-history").exit_code == 0
    assert len(history_rows(path)) == 2
    assert narrowgauge("merge", "reports/1", "reports/2").exit_code == 0
    assert len(history_rows(path)) == 4
    shown = narrowgauge("compare", "--history", "-k", "quantize and bf16")
    assert shown.exit_code == 0
    assert "reference on cpu, quick tier: 2 runs" in shown.stdout
    for arguments in (
        ["compare"],
        ["compare", "a"],
        ["compare", "a", "b", "--history"],
        ["compare", "a", "b", "-k", "x"],
    ):
        assert narrowgauge(*arguments).exit_code == 2
    path.write_bytes(b"damaged" * 999)
    result = narrowgauge(*command)
    assert result.exit_code == 0
    assert result.stdout.count("warning: the run is not in the history") == 1
    assert (tmp_path / "reports" / "latest" / "index.html").exists()
