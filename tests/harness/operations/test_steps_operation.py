"""The object of an operation can be filled from data: one code file with a list of steps is an operation."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.operations import VARIABLE, case_from_id, use_operations
from narrowgauge.harness.running.runner import run_case

FILE = """
import json
from pathlib import Path

from tests.harness.operations.steps_operation import operation_of_steps

STEPS = json.loads(Path(__file__).with_suffix(".json").read_text())
OPERATION = operation_of_steps("rms-norm", {"x": ("M", "K"), "weight": ("K",)}, {"eps": 1e-6}, STEPS)
"""
STEPS = [
    ("z", "float32", ["x"]), ("s", "square", ["z"]), ("m", "mean", ["s"]), ("e", "plus", ["m", "eps"]),
    ("r", "rsqrt", ["e"]), ("n", "times", ["z", "r"]), ("c", "cast", ["n"]), ("w", "float32", ["weight"]),
    ("p", "times", ["c", "w"]), ("y", "to-output", ["p"]),
]  # fmt: skip
CASE = "rms-norm/5x96/bf16/outliers"


@pytest.fixture(autouse=True)
def operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operation rms-norm: one file of code, and the steps as data."""
    (tmp_path / "rms_norm.py").write_text(FILE, encoding="utf-8")
    (tmp_path / "rms_norm.json").write_text(json.dumps(STEPS), encoding="utf-8")
    monkeypatch.setenv(VARIABLE, "")
    use_operations([tmp_path])
    yield
    for name in [name for name in sys.modules if name.startswith("narrowgauge_operations")]:
        del sys.modules[name]


class Kernel:
    """RMSNorm in float64 between the roundings."""

    def __init__(self, *, rounds: bool = True) -> None:
        self.rounds = rounds

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
        """The normalized rows (M, K) times weight (K,), bfloat16."""
        z = x.float()
        n = z * (((z * z).double().mean(-1, keepdim=True).float() + eps).double().rsqrt().float())
        return ((n.bfloat16().float() if self.rounds else n) * weight.float()).bfloat16()


def record(kernel: Kernel, name: str = CASE) -> dict[str, Any]:
    """The record of a case."""
    case = case_from_id(name)
    assert case is not None
    return run_case(case, Backend.local("kernel", kernel)).to_dict()


def test_right_kernels_pass_with_every_value_of_a_key() -> None:
    for name in (CASE, f"{CASE}/eps:0.5", "rms-norm/1x7/bf16/normal/eps:1e-12"):
        assert record(Kernel(), name)["verdict"] == "pass", name


def test_a_step_that_is_left_out_is_the_cause() -> None:
    found = record(Kernel(rounds=False))
    assert (found["verdict"], found["stage"]) == ("fail", "y")
    assert next((entry["cause"], entry["exact"]) for entry in found["explanations"]) == ("cast-6-left-out", True)


def test_a_key_reaches_the_kernel() -> None:
    class OtherEps(Kernel):
        def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
            return super().rms_norm(x, weight)

    assert record(OtherEps())["verdict"] == "pass"
    assert record(OtherEps(), f"{CASE}/eps:0.5")["verdict"] == "fail"
