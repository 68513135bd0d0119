"""Start of a run: imports of its process, and the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from narrowgauge.harness.cli import app
from narrowgauge.harness.hosts import starter

CASE = """
[[matrix]]
operation = "quantize"
tier = "quick"
recipe = "nvfp4"
shape = [16, 32]
dtype = "bf16"
inputs = "normal"
usage = "rowwise"
"""
RUN = """
import sys
from narrowgauge.harness.cli import main
from narrowgauge.harness.report import report

def unwritten(*arguments, **options):
    raise report.ReportError("no page, torch" if "torch" in sys.modules else "no page")

report.write_journaled = unwritten  # bound by the module of the run when it is imported
sys.argv = ["narrowgauge", "run", *sys.argv[1:]]
main()
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`narrowgauge run` of a case that passes, in a process that can write no page."""
    (folder / "cases.toml").write_text(CASE)
    command = [sys.executable, "-c", RUN, "cases.toml", "--backend", "reference", "-n", "1", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_the_verdict_comes_before_the_page_and_without_torch(tmp_path):
    process = run(tmp_path)
    assert "1 case passed" in process.stdout, process.stderr
    assert process.stderr.splitlines()[-1] == "narrowgauge: no page"
    assert process.returncode != 0


def test_a_usage_error_leaves_no_starter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starter, "_starter", None)
    (tmp_path / "cases.toml").write_text(CASE)
    before = starter.children(os.getpid())
    for options in (["-k", "nothing"], ["--device", "tpu"], ["--shard", "5/4"]):
        result = CliRunner().invoke(app, ["run", "cases.toml", *options])
        assert result.exit_code == 2, result.output
        assert starter._starter is None
    assert starter.children(os.getpid()) == before
