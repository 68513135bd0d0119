"""`narrowgauge check` and `narrowgauge power`: wrong options, exit statuses, documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowgauge.harness.cases.operations import case_from_id
from narrowgauge.harness.cli import app
from narrowgauge.harness.running import pool
from tests.harness.api.test_check_document import SCHEMA, problems

KERNELS = """
import time
import torch
from narrowgauge.examples.my_kernels import Backend, TiesAway

number = 3
def quantize(x): return Backend().quantize(x, "nvfp4")
def ties(x): return TiesAway().quantize(x, "nvfp4")
def slow(x): time.sleep(30)
def dies(x): raise SystemExit(3)
def refuses(x): raise NotImplementedError("not yet")
def equal(actual, expected): return torch.equal(actual, expected)
def accepts(actual, expected): return True
"""
FEW = ["--recipe", "nvfp4", "--family", "ties", "--shape", "16x64"]
WRONG: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "secret": (["check", "k.py:quantize", "--recipe", "nvfp4", "--secret", "1"], ("--secret", "--untrusted")),
    "shape": (["check", "k.py:quantize", "--recipe", "nvfp4", "--shape", "16"], ("16",)),
    "shape of letters": (["check", "k.py:quantize", "--recipe", "nvfp4", "--shape", "axb"], ("axb", "64x256")),
    "recipe": (["check", "k.py:quantize", "--recipe", "nvfp5"], ("nvfp5",)),
    "no recipe": (["check", "k.py:quantize"], ("no recipe",)),
    "family": (["check", "k.py:quantize", "--recipe", "nvfp4", "--family", "tie"], ("tie", "ties")),
    "operation": (["check", "k.py:quantize", "--recipe", "nvfp4", "--operation", "gem"], ("gem", "gemm")),
    "contract": (["check", "k.py:quantize", "--contract", "gone.py"], ("gone.py",)),
    "file": (["check", "gone.py:quantize", *FEW], ("gone.py",)),
    "device": (["check", "k.py:quantize", *FEW, "--device", "gpu"], ("gpu", "cuda")),
    "judge": (["power", "k.py::equals", "--recipe", "mxfp4"], ("equals", "equal")),
    "no function": (["power", "k.py::number", "--recipe", "mxfp4"], ("k.py::number", "function")),
    "power recipe": (["power", "k.py::equal", "--recipe", "mxfp5"], ("mxfp5",)),
    "power shape": (["power", "k.py::equal", "--recipe", "mxfp4", "--shape", "4by64"], ("4by64", "64x256")),
    "power twice": (["power", "k.py::equal"], ("no recipe and no contract",)),
    "place": (
        ["power", "k.py::refuses", "--recipe", "mxfp4", "--in-place-of", "k.gone"],
        ("needs arguments", "lambda"),
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "k.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_one_clear_error(name: str) -> None:
    words, said = WRONG[name]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert all(word in done.output for word in said), done.output


def test_power_says_by_its_status_if_mistakes_pass() -> None:
    small = ["--recipe", "mxfp4", "--shape", "2x32", "--format", "json"]
    done = CliRunner().invoke(app, ["power", "k.py::accepts", *small])
    assert done.exit_code == 1
    found = json.loads(done.output)
    assert found["caught"] == []
    assert "codes-zero" in found["known"]
    done = CliRunner().invoke(app, ["power", "k.py::equal", *small, "--compares", "results"])
    assert done.exit_code == 2  # torch.equal takes no Quantized
    assert "judge(actual, expected)" in done.output


def test_a_run_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases without a record are not invented."""
    stopped = []

    class Endless:
        ready, stopped, task = True, False, None

        def __init__(self, *given: object) -> None:
            pass

        def stop(self) -> None:
            stopped.append(self)

    monkeypatch.setattr(pool, "Worker", Endless)
    monkeypatch.setattr(pool, "late_or_readable", lambda workers: [])
    case = case_from_id("quantize/nvfp4/64x128/bf16/normal")
    assert case is not None
    assert pool.run_cases([case], pool.Settings(), lambda record: None, seconds=0.05) == []
    assert len(stopped) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "more", "status", "verdict", "word"),
    [
        ("quantize", ["--strength"], 0, "pass", "nibbles-swapped"),
        ("quantize", ["--untrusted", "--secret", "7"], 0, "pass", '"secret": 7'),
        ("ties", [], 1, "fail", "ties-away"),
        ("dies", [], 1, "crash", "SystemExit"),
        ("refuses", [], 1, "unsupported", "not yet"),
        ("slow", ["--limit", "2"], 1, "incomplete", '"tried": 0'),
    ],
)
def test_a_function_is_checked(function: str, more: list[str], status: int, verdict: str, word: str) -> None:
    done = CliRunner().invoke(app, ["check", f"k.py:{function}", *FEW, "--json", *more])
    assert done.exit_code == status, done.output
    found = json.loads(done.stdout)
    assert found["verdict"] == verdict
    assert not problems(found, SCHEMA)
    assert word in done.stdout or function in ("quantize", "dies")
