"""Start of a run: imports of its process, and its child processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    raise report.ReportError(", ".join(["no page", *({"torch", "pandas", "_pytest"} & set(sys.modules))]))

report.write_journaled = unwritten  # bound by the module of the run when it is imported
sys.argv = ["narrowgauge", "run", *sys.argv[1:]]
main()
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`narrowgauge run` of a case that passes, in a process that can write no page."""
    (folder / "cases.toml").write_text(CASE)
    command = [sys.executable, "-c", RUN, "cases.toml", "--backend", "reference", "-n", "1", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.long
def test_the_verdict_comes_before_the_page_and_without_torch(tmp_path):
    process = run(tmp_path, "-k", "quantize/nvfp4/16x32/bf16/normal")
    assert "1 case passed" in process.stdout, process.stderr
    assert process.stderr.splitlines()[-1] == "narrowgauge: no page"
    assert process.returncode != 0


@pytest.mark.long
def test_judges_hold_no_kernels(tmp_path):
    """The server is forked before the starter imports the kernels, and imports the oracle in the meantime."""
    (tmp_path / "imported.py").write_text("""
import sys

def main(connection):
    names = ("native.ops", "reference.ops")
    connection.send({"held": [name for name in names if f"narrowgauge.{name}" in sys.modules]})
""")
    code = """
from narrowgauge.harness.hosts.starter import starter
from narrowgauge.harness.running.supervisor import Fork, start_server

start_server()
starter().connect().close()
print(*Fork("imported:main", []).receive()["held"])
"""
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert process.stdout.split() == ["reference.ops"], process.stderr
