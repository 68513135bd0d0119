"""`narrowgauge list --coverage`: input families with cells of their own, and captured tensors beside families."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from narrowgauge.harness.certify.coverage import by_family, compared_lines, lines
from narrowgauge.harness.cli import app
from narrowgauge.harness.inputs.capture import Captured, captured_cases
from narrowgauge.harness.operations.quantize.case import QuantizeCase
from tests.matrix import quick_cases


def cases(*families: str) -> list[QuantizeCase]:
    return [QuantizeCase(recipe="nvfp4", shape=(16, 64), dtype="bf16", inputs=family) for family in families]


def test_families_and_what_they_add() -> None:
    found = by_family(cases("normal", "e2m1-ties", "normal"))
    assert list(found) == ["nvfp4"]
    assert list(found["nvfp4"]) == ["normal", "e2m1-ties"]
    text = list(lines(cases("normal", "e2m1-ties", "zeros")))
    assert text[0].startswith("nvfp4: ")
    assert "of 127 scales" in text[0]
    assert {line.split(":")[0].strip() for line in text[1:]} == {"normal", "e2m1-ties", "zeros"}
    assert text[-1].endswith("zeros: 1, 1 of these alone")


def test_cases_without_coverage() -> None:
    chosen = [QuantizeCase(recipe="fp8-row-e4m3", shape=(16, 64), dtype="bf16", inputs="normal")]
    assert list(lines(chosen)) == ["no rowwise case of quantize has byte scales, rounding to nearest and no rotation"]


def test_captured_tensors_beside_the_families(tmp_path: Path) -> None:
    x = torch.zeros(1, 32)
    x[0, :3], x[0, 16] = torch.tensor([6.0, 0.25, 0.2]), 2688.0
    save_file({"w": x}, tmp_path / "own.safetensors")
    captured = Captured.load(tmp_path / "own.safetensors")
    own, theirs, alone = compared_lines(captured_cases(captured), captured, cases("zeros"))
    assert own.startswith("nvfp4, captured tensors: 0.1 % of 3 544 pairs")
    assert theirs.startswith("nvfp4, input families: 0.0 % of 3 544 pairs")
    assert alone == "    6 pairs only by the captured tensors, 1 only by the families"


@pytest.mark.long
def test_the_quick_tier_reaches_99_percent() -> None:
    plain = {"nvfp4", "mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4"}
    chosen = [case for case in quick_cases() if case.recipe_label in plain and case.inputs == "boundaries"]
    found = by_family(chosen)
    assert set(found) == plain
    for recipe, families in found.items():
        assert families["boundaries"].share > 0.99, recipe


@pytest.mark.long
def test_the_command_prints_coverage(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["list", "--coverage", "-k", "quantize/mxfp4/"])
    assert result.exit_code == 0, result.output
    assert "pairs of a scale and a side of a boundary" in result.output
    save_file({"w": torch.ones(4, 32)}, tmp_path / "own.safetensors")
    given = ["--input", str(tmp_path / "own.safetensors"), "--recipe", "mxfp4"]
    result = CliRunner().invoke(app, ["list", "--coverage", *given])
    assert result.exit_code == 0, result.output
    assert "mxfp4, input families: 99" in result.output
