"""Comparing two runs: what is said in the terminal and on the page."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from narrowgauge.harness.cli import app
from narrowgauge.harness.gate import compare as compare_module
from narrowgauge.harness.gate.compare import compare, show
from narrowgauge.harness.records.journal import RecordedRun
from tests.harness.runs import GPU, product, record, run, saved, wrong

NASTY = """<script>alert(1)</script>&"'"""
A = run(record(), record("zeros"), record("ties"), product(), product("lattice"), record("e4m3", budget_max=1.0))
B = run(
    record(seconds=1.0),
    record("zeros", verdict="fail", mismatches=3, message=NASTY, output_digest="33" * 8),
    record("inf", verdict="error", message="raised"),
    product(budget_max=0.3, output_digest="44" * 8, input_digest="55" * 8),
    product("lattice", budget_max=1.5, seconds=None),
    record("e4m3", budget_max=float("nan")),
    backend="mine:Backend", device="cuda", environment={"commit": "def", **GPU},
)  # fmt: skip
KINDS = {
    "verdict changed": [
        f"quantize/nvfp4/64x128/bf16/zeros: fail, was pass; 3 wrong elements, was 0 ({NASTY})",
    ],
    "figures worse": ["gemm/nvfp4/33x64x17/bf16xbf16-fp32/lattice/tn: largest fraction of the bound 2^1, was 2^0"],
    "figures better": ["gemm/nvfp4/33x64x17/bf16xbf16-fp32/normal/tn: largest fraction of the bound 2^-1, was 2^0"],
    "not finite": ["quantize/nvfp4/64x128/bf16/e4m3: budget_max is nan, was finite"],
    "only in A": ["quantize/nvfp4/64x128/bf16/ties: pass"],
    "only in B": ["quantize/nvfp4/64x128/bf16/inf: error (raised)"],
    "other bytes of the same inputs": [f"quantize/nvfp4/64x128/bf16/zeros: {'33' * 8}, was {'22' * 8}"],
}


def printed(a: RecordedRun, b: RecordedRun) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(compare(a, b), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_differs() -> None:
    comparison = compare(A, B)
    assert {kind: [": ".join(line) for line in lines] for kind, lines in comparison.kinds.items()} == KINDS
    assert comparison.outputs == (
        "5 cases in both runs, 4 of them with results of the same inputs: 3 with equal bytes, 1 with other bytes"
    )
    assert comparison.heads == [
        ("backend", "native", "mine:Backend"),
        ("architecture", "host", "sm_90"),
        ("seed", "0", "0"),
        ("cases", "6 pass", "4 pass, 1 fail, 1 error"),
        ("commit", "abc", "def"),
        ("GPU", "", GPU["GPU"]),
    ]
    assert not comparison.no_worse


def test_the_terminal_says_all_of_it() -> None:
    output = printed(A, B)
    for kind, lines in KINDS.items():
        assert f"{kind}: {len(lines)}\n" in output
        for line in lines:
            case, _, words = line.partition(": ")
            assert f"    {case}" in output
            assert all(word in output for word in re.split("; | \\(|\\)", words) if word)
    assert re.search(r"architecture +host +sm_90 *\n", output)
    assert re.search(r"all +4 +2 s +2\.5 s +1\.25 +1 *\n", output)
    assert output.splitlines()[-1].startswith(
        "B is worse than A; verdict changed: 1; figures worse: 1; figures better: 1"
    )


def test_a_case_that_is_not_finite_has_a_verdict_all_the_same() -> None:
    bad = record(verdict="fail", budget_max=float("nan"), message="off \ud800")
    comparison = compare(run(record()), run(bad))
    assert comparison.kinds["verdict changed"] == [
        ("quantize/nvfp4/64x128/bf16/normal", "fail, was pass (off \\ud800)")
    ]
    assert comparison.kinds["not finite"] == [("quantize/nvfp4/64x128/bf16/normal", "budget_max is nan, was finite")]
    assert compare_module.render(comparison, "\udc80", "b").encode()


@pytest.mark.parametrize(
    ("a", "b", "no_worse"),
    [
        (run(record(budget_max=1.0)), run(record(budget_max=0.5)), True),
        (run(record(budget_max=0.5)), run(record(budget_max=1.0)), False),
        (run(record()), run(record(), record("zeros")), True),
        (run(record(), record("zeros")), run(record()), False),
        (run(record(budget_max=float("nan"))), run(record(budget_max=1.0)), True),
        (run(record()), run(record(output_digest="33" * 8)), True),
        (run(), run(record()), False),  # no case in both runs
    ],
)
def test_no_worse(a: RecordedRun, b: RecordedRun, no_worse: bool) -> None:
    assert compare(a, b).no_worse is no_worse


def narrowgauge(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_command(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", run(record(), product())), saved(tmp_path / "b", run(wrong(), product()))
    html = tmp_path / "pages" / "page.html"
    comparison = narrowgauge("compare", a, b)
    assert (comparison.exit_code, html.exists()) == (1, False)
    assert "verdict changed: 1\n" in comparison.stdout
    comparison = narrowgauge("compare", a, a, "--html", html)
    assert comparison.exit_code == 0
    assert "B is nowhere worse than A" in html.read_text(encoding="utf-8")
    assert f"A is {a}, B is {a}" in html.read_text(encoding="utf-8")


def test_what_the_command_cannot_do(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", run(record()))
    comparison = narrowgauge("compare", a, tmp_path / "none")
    assert (comparison.exit_code, comparison.stdout) == (2, "")
    assert comparison.stderr.startswith(f"narrowgauge: {tmp_path}/none: there is no none; ")
    comparison = narrowgauge("compare", a, a, "--html", tmp_path / "a" / "records.jsonl" / "page.html")
    assert comparison.exit_code == 2
    assert "page.html: cannot be written: " in comparison.stderr
