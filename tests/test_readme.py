"""README.md is true: its report is what the harness prints, and every command in it runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.case import load
from narrowgauge.harness.cli import app
from narrowgauge.harness.report.view import first_failure, saved_lines
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.running.save_failures import Keeper
from narrowgauge.reference import ops
from narrowgauge.reference.quantize.layout import pack
from narrowgauge.reference.quantize.scaling import element_factors
from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.partition("  #")[0].strip()
    for language, block in BLOCKS
    if language == "sh"
    for line in block.splitlines()
    if line.strip()
]
FIRST_PYTEST = next(command for command in COMMANDS if command.startswith("pytest"))


class TiesAway:
    """Rounds ties of E2M1 away from zero, as >= in place of > does."""

    def quantize(self, x, recipe, *, amax=None, random=None):
        right = ops.quantize(x, recipe)
        factors = element_factors(right.scales, right.tensor_scale, right.recipe)
        scaled = (x.float().view(x.shape[0], -1, 16) * factors.unsqueeze(2)).view(x.shape)
        midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        codes = (scaled.abs().unsqueeze(2) >= midpoints).sum(2) | (scaled.signbit() * 8)
        return pack(codes.to(torch.uint8)), right.scales, right.amax


@pytest.mark.parametrize(("inputs", "verdict"), [("normal", "pass"), ("e2m1-ties", "fail")])
def test_the_report_on_the_first_screen_is_what_the_harness_says(inputs: str, verdict: str) -> None:
    cases = {case.id: case for case in load(ROOT / "cases" / "nvfp4_quantize.toml")}
    case = cases[f"quantize/nvfp4/256x1024/bf16/{inputs}"]
    record = run_case(case, Backend("ties_away:Backend", TiesAway())).to_dict()
    assert record["verdict"] == verdict
    if verdict == "fail":
        assert first_failure(record) in README


def test_the_reference_is_used_as_the_readme_says() -> None:
    (block,) = (
        block for language, block in BLOCKS if language == "python" and block.startswith("import narrowgauge\n")
    )
    names: dict[str, Any] = {}
    exec(block, names)
    assert (names["q"].codes.shape, names["q"].scales.shape, names["q"].amax.shape) == ((256, 512), (256, 64), (1,))
    assert names["y"].shape == (256, 256)


def test_make_knows_every_target_that_readme_and_workflow_name() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    runs = "\n".join(line for line in workflow.splitlines() if "run:" in line)
    targets = re.findall(r"make [a-z]+(?: [A-Z]+=\w+)*", README + runs)
    assert "make test PYTHON=python" in targets
    assert {"make report", "make test", "make bench", "make report DEVICE=cuda PY=python3"} <= set(targets)
    for target in targets:
        done = subprocess.run([*shlex.split(target), "-n"], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands speak of: the backend of the README, its extension, and captured weights."""
    folder = tmp_path_factory.mktemp("readme")
    backend = next(block for language, block in BLOCKS if language == "python" and "class Backend" in block)
    (folder / "my_kernels.py").write_text(backend, encoding="utf-8")
    (folder / "my_extension.py").write_text(
        "from narrowgauge.reference import ops\n\n\ndef nvfp4_quantize(x):\n"
        "    q = ops.quantize(x, 'nvfp4')\n    return q.codes, q.scales, q.amax\n",
        encoding="utf-8",
    )
    from safetensors.numpy import save_file

    weights = np.random.default_rng(0).standard_normal((96, 64), dtype=np.float32)
    save_file({"encoder.layer.0.output.dense.weight": weights}, folder / "weights.safetensors")
    _fail(folder)
    return folder


def _fail(folder: Path) -> dict[str, Any]:
    """The failure that the README shows, shrunk and saved below a folder."""
    cases = {case.id: case for case in load(ROOT / "cases" / "nvfp4_quantize.toml")}
    case = cases["quantize/nvfp4/256x1024/bf16/e2m1-ties"]
    keeper = Keeper(folder / "reports" / "latest" / "failures")
    return run_case(case, Backend("ties_away:Backend", TiesAway()), keeper=keeper).to_dict()


def test_the_lines_of_a_saved_failure_are_what_the_harness_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "\n".join(saved_lines(_fail(tmp_path))) in README


@pytest.mark.parametrize(
    "command",
    # Of those that start pytest one stays: each collects all cases, and runs some of them in about the same way.
    [pytest.param(c, marks=pytest.mark.long if c.startswith("pytest") and c != FIRST_PYTEST else ()) for c in COMMANDS
     if not c.startswith("make")],
)  # fmt: skip
def test_every_command_of_the_readme_runs(
    command: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(command.replace("weights.safetensors", str(prepared / "weights.safetensors")))
    words = [str(prepared / word) if word.startswith("reports/latest/failures/") else word for word in words]
    program, *words = words
    runs = program == "pytest" or words[0] == "run"
    if "cuda" in words:
        words[words.index("cuda")] = "cuda" if torch.cuda.is_available() else "cpu"
    # Some of its cases, in one worker: `make test` runs them all anyway, and a process takes seconds to begin.
    if runs and "-k" in words:
        selected = words.index("-k") + 1
        words[selected] = f"({words[selected]}) and (128x128 or lattice)"
    if words[0] == "run" or "-n" in words:
        words += ["-n", "1" if words[0] == "run" else "0"]
    if words[-1] == "--lf":
        words += ["-k", "256x1024x256 and lattice", "-o", f"cache_dir={tmp_path}"]
    if runs:
        words += ["--report-dir", str(tmp_path / "report")]
    status, output = _PROGRAMS[program](words, prepared, monkeypatch)
    assert status == 0, output
    if words[0] == "dialect":
        assert f"\n{output.splitlines()[-1]}\n" in README


def _narrowgauge(words: list[str], prepared: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """In this process, which has imported torch."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(prepared)
    done = CliRunner().invoke(app, words)
    return done.exit_code, done.output + (repr(done.exception) if done.exception else "")


def _pytest(words: list[str], prepared: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(prepared), "PYTEST_ADDOPTS": "-p no:hypothesispytest"},  # it takes seconds
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


_PROGRAMS = {"narrowgauge": _narrowgauge, "pytest": _pytest}
