"""What a run does between its command and its verdict: imports and processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
