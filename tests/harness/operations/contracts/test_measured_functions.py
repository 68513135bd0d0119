"""Measured errors of functions in place of documented ones: narrower intervals, and reports with a note."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from narrowgauge import contract as c
from narrowgauge.harness.cli import app
from narrowgauge.harness.operations.contracts.judge import assumed
from narrowgauge.harness.records.environment import describe_run
from narrowgauge.harness.running.worker import Settings
from narrowgauge.reference.contracts.functions import FUNCTIONS, apply, function_of
from narrowgauge.reference.contracts.interval import exactly
from narrowgauge.spec.program import FUNCTIONS_VARIABLE, FunctionsFileError, read_functions, use_functions

ABOUT = {"gpu": "GPU 1", "driver": "2", "compiler": "NVRTC 3"}


@c.contract
def exponential(x: c.Matrix):
    """e^x."""
    return c.cast(c.exp(c.float32(x)), x.dtype)


def row(name: str, ulps: float, flushed: int = 0) -> dict[str, Any]:
    return {"function": name, "ulp_of_exact": ulps, "flushed": flushed}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FUNCTIONS_VARIABLE, "")
    path = tmp_path / "functions.json"
    rows = [row("expf", 0.75), row("ex2.approx.f32", 0.75), row("rsqrtf", 2.5, flushed=4), row("unknown", 1.0)]
    path.write_text(json.dumps({"about": ABOUT, "functions": rows}))
    return path


def width(name: str, x: float) -> float:
    """Steps between the ends of a function of one number."""
    found = apply(name, exactly(torch.tensor([x], dtype=torch.float64)))
    ends = [torch.tensor(float(end)).float().view(torch.int32) for end in (found.low, found.high)]
    return int(ends[1] - ends[0])


def test_measured_errors_narrow_and_widen_intervals(file: Path) -> None:
    documented = {name: width(name, 1.3) for name in ("exp", "rsqrt", "tanh")}
    use_functions(file)
    assert os.environ[FUNCTIONS_VARIABLE] == str(file)
    assert width("exp", 1.3) < documented["exp"]
    assert width("rsqrt", 1.3) >= documented["rsqrt"]
    assert width("tanh", 1.3) == documented["tanh"]
    assert function_of("tanh") == FUNCTIONS["tanh"]
    assert function_of("rsqrt").forms["rsqrtf"].absolute == 2.0**-126
    assert function_of("exp").forms["__expf"] == FUNCTIONS["exp"].forms["__expf"]


def test_reports_name_the_measurement(file: Path) -> None:
    program = exponential.trace({"x": "bfloat16"}, {}, {})
    assert "CUDA C++ Programming Guide" in assumed(program)
    use_functions(file)
    assert "measured: expf within 0.75 ulps of the exact result, GPU 1, 2, NVRTC 3" in assumed(program)
    assert (
        describe_run(backend="native", device="cpu", seed=0)["errors of functions"] == "measured on GPU 1, 2, NVRTC 3"
    )
    assert Settings(backend="native").options.split(" ")[0] == "--functions"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no errors of functions"), ("[1]", "has no errors of functions"), ("{}", "has no errors of functions"),
        (json.dumps({"about": ABOUT, "functions": [row("expf", 0.0)]}), "expf is off by 0.0 ulps"),
        (json.dumps({"about": ABOUT, "functions": [row("expf", float("nan"))]}), "expf is off by nan ulps"),
    ],
)  # fmt: skip
def test_a_file_without_errors_is_one_message(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / f"{abs(hash(text))}.json"
    path.write_text(text)
    with pytest.raises(FunctionsFileError, match=f"{path}: {words}.*doctor --functions --save"):
        read_functions(str(path))


def test_the_command_names_a_missing_file(file: Path) -> None:
    result = CliRunner().invoke(app, ["show", "quantize/nvfp4/16x32/bf16/normal", "--functions", f"{file}.no"])
    assert result.exit_code == 2
    assert "--functions" in result.output
    assert "cannot be read: No such file" in result.output.replace("\n", " ")
