"""`narrowgauge predict`: expected bits of a product on a GPU that is not at hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from narrowgauge.harness.api.predict import digest
from narrowgauge.harness.cli.commands import app
from narrowgauge.reference.accumulators.hardware import find_hardware
from narrowgauge.reference.accumulators.product import product
from narrowgauge.reference.numbers.decode import decode_packed
from narrowgauge.spec.formats import E2M1


def predict(*options: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["predict", *options])
    assert result.exit_code == status, result.output
    return result.output


def test_the_file_holds_operands_and_predicted_bits(tmp_path: Path) -> None:
    path = str(tmp_path / "expected.safetensors")
    shown = predict("--hardware", "blackwell-nvfp4", "--shape", "24x128x40", "--save", path)
    tensors = load_file(path)
    a, b = (decode_packed(tensors[side], E2M1, 128) for side in ("a", "b"))
    scales = [tensors[f"{side}_scales"].view(torch.float8_e4m3fn).float() for side in ("a", "b")]
    y = product(a, b, find_hardware("blackwell-nvfp4"), scales=(scales[0], scales[1]))
    assert torch.equal(tensors["y"], y)
    left, right = (x * s.repeat_interleave(16, 1) for x, s in zip((a, b), scales, strict=True))
    assert torch.allclose(y, left @ right.T, rtol=1e-4, atol=float(y.abs().max()) * 1e-6)
    with safe_open(path, "pt") as file:
        assert file.metadata()["sha256"] == digest(y)
    assert digest(y) in shown
    assert "not run here" in shown
    again = predict("--hardware", "blackwell-nvfp4", "--shape", "24x128x40", "--input", path)
    assert digest(y) in again


def test_results_of_the_gpu_are_compared_bit_for_bit(tmp_path: Path) -> None:
    path, other = str(tmp_path / "expected.safetensors"), str(tmp_path / "gpu.safetensors")
    usual = ["--hardware", "hopper-bf16", "--shape", "16x64x8"]
    predict(*usual, "--save", path)
    y = load_file(path)["y"]
    for found in (y, y.bfloat16()):
        save_file({"y": found}, other)
        assert "all 128 outputs have the predicted bits" in predict(*usual, "--compare", other)
    y.view(torch.int32)[3, 5] ^= 1
    save_file({"y": y}, other)
    assert "1 of 128 outputs differ, the first at row 3, column 5" in predict(*usual, "--compare", other, status=1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hardware", "hopper-fp4", "--shape", "8x64x8"], "'hopper-fp4' is no hardware model"),
        (["--hardware", "hopper-fp8", "--shape", "8x64"], "--shape is '8x64'"),
        (["--hardware", "hopper-fp8", "--shape", "8x64x8", "--operands", "bf16"], "multiplies e4m3, e5m2; not 'bf16'"),
        (["--hardware", "hopper-fp8", "--shape", "8x64x8", "--family", "none"], "none"),
        (["--hardware", "hopper-fp8", "--shape", "8x64x8", "--promoted", "48"], "no multiple of the 32"),
        (["--hardware", "hopper-fp8", "--shape", "8x64x8", "--input", "y.safetensors"], "has no a, b"),
        (["--hardware", "hopper-fp8", "--shape", "8x64x8", "--input", "ab.safetensors"], "a is torch.float32"),
        (["--hardware", "hopper-bf16", "--shape", "8x64x8", "--input", "bf16.safetensors"], "K = 64 of bf16 takes 64"),
        (["--hardware", "hopper-bf16", "--shape", "8x32x8", "--input", "bf16.safetensors"], "product of 4 by 4 rows"),
        (["--hardware", "hopper-fp8", "--shape", "8x64x8", "--compare", "ab.safetensors"], "has no tensor y"),
        (["--hardware", "hopper-fp8", "--shape", "8x64x8", "--compare", "y.safetensors"], "it must be float32"),
        (["--hardware", "hopper-fp8", "--shape", "8x64x8", "--compare", "none.safetensors"], "none.safetensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_name_the_value(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"y": torch.zeros(4, 4)}, "y.safetensors")
    save_file({"a": torch.zeros(8, 64), "b": torch.zeros(8, 64)}, "ab.safetensors")
    half = {name: torch.zeros(4, 32, dtype=torch.bfloat16) for name in ("a", "b")}
    save_file(half, "bf16.safetensors")
    assert message in " ".join(predict(*options, status=2).split())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        ["--seed", "1"], ["--family", "outliers"], ["--promoted", "64"], ["--splits", "2"], ["--operands", "e5m2,e4m3"],
        ["--hardware", "blackwell-fp8"],
    ],
    ids=lambda options: options[0],
)  # fmt: skip
def test_every_option_changes_the_digest(options: list[str]) -> None:
    usual = ["--hardware", "hopper-fp8", "--shape", "16x256x8"]
    assert predict(*usual).split()[5] != predict(*usual, *options).split()[5]
