"""The assertion on contracts: right kernels pass, wrong kernels fail with the cause, bad arguments are refused."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.contracts.activation import silu_mul_quantize_static
from narrowgauge.reference.contracts.evaluate import judged
from tests.paths import ROOT
from tests.reference.contracts.contracts import add_rmsnorm, rmsnorm_quantize, silu_mul_quantize

Kernel = Callable[[torch.Tensor, torch.Tensor], Any]
RECIPE = "fp8-row-e4m3"


def rmsnorm(x: torch.Tensor, w: torch.Tensor, mistake: str = "", recipe: str = RECIPE) -> narrowgauge.Quantized:
    """A correct kernel of `rmsnorm_quantize`, or one with a mistake."""
    z = x.float()
    y = z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-6)
    if mistake != "first cast":
        y = y.bfloat16().float()
    y = y * (w.float() + (mistake == "1 + w"))
    return narrowgauge.quantize(y.bfloat16(), recipe)


def inputs(rows: int = 64, columns: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=draw).bfloat16()
    return x, (1 + 0.1 * torch.randn(columns, generator=draw)).bfloat16()


@pytest.mark.parametrize("recipe", [RECIPE, "nvfp4", "mxfp8-e4m3"])
def test_a_right_kernel_passes(recipe: str) -> None:
    x, w = inputs()
    q = rmsnorm(x, w, recipe=recipe)
    narrowgauge.assert_result(rmsnorm_quantize, q, x, w, recipe=recipe)
    parts = (q.codes, q.scales) if q.amax is None else (q.codes, q.scales, q.amax)
    narrowgauge.assert_result(rmsnorm_quantize, parts, x, weight=w, recipe=recipe)
    named = dict(zip(("codes", "scales", "amax"), parts, strict=False))
    narrowgauge.assert_result(rmsnorm_quantize, named, x, w, recipe=recipe)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        ("first cast", "x·rsqrt(mean(x²) + 1e-06) is not rounded to bfloat16"),
        ("1 + w", "the factor is 1 + weight"),
    ],
)
def test_a_mistake_is_named_with_its_line(mistake: str, cause: str) -> None:
    x, w = inputs()
    verdict = narrowgauge.explain(
        narrowgauge.assert_result, rmsnorm_quantize, rmsnorm(x, w, mistake), x, w, recipe=RECIPE, diagnose="full"
    )
    assert not verdict.passed
    found = [each["sentence"] for each in verdict.explanations if each["exact"]]
    assert len(found) == 1, found
    assert found[0].startswith(f"{cause} (line ")
    line = int(found[0].partition("(line ")[2].partition(")")[0])
    text = (ROOT / "tests" / "reference" / "contracts" / "contracts.py").read_text(encoding="utf-8").splitlines()
    words = {"first cast": "if rounded", "1 + w": "weight), x.dtype"}
    assert words[mistake] in text[line - 1] + text[line - 2]


def test_a_result_that_is_shown_is_judged_by_itself() -> None:
    """A wrong residual is one finding: the output is judged from the residual that the kernel shows."""
    x, w = inputs(4, 64)
    residual = torch.ones_like(x)

    def kernel(wrong: bool) -> tuple[torch.Tensor, torch.Tensor]:
        z = (x.float() + residual.float()).bfloat16()
        z = z + wrong
        h = z.float()
        return z, (h * torch.rsqrt(h.square().mean(1, keepdim=True) + 1e-6) * w.float()).bfloat16()

    given = (x, residual, w)
    narrowgauge.assert_result(add_rmsnorm, kernel(False), *given)
    verdict = narrowgauge.explain(narrowgauge.assert_result, add_rmsnorm, kernel(True), *given)
    assert [bool(stage["sentence"]) for stage in verdict.stages] == [True, False]
    narrowgauge.assert_result(add_rmsnorm, {"output": kernel(False)[1]}, *given)


def test_a_given_scale_and_codes_alone() -> None:
    x, scale = inputs(4, 64)[0], torch.tensor([0.25])
    gate, up = x.float().chunk(2, 1)
    y = ((gate * torch.sigmoid(gate)).bfloat16().float() * up).bfloat16().float()
    codes = (y * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    given = (x, scale)
    narrowgauge.assert_result(silu_mul_quantize_static, codes, *given, rounded="both")
    other = codes.float().neg().to(codes.dtype)
    verdict = narrowgauge.explain(narrowgauge.assert_result, silu_mul_quantize_static, other, *given, rounded="both")
    assert not verdict.passed


def test_the_dialect_behind_a_recipe_gives_the_options() -> None:
    x, scale, recipe = inputs()[0], torch.tensor([0.037]), "fp8-static-e4m3@vllm-silu-static"
    gate, up = x.float().chunk(2, dim=1)
    once, twice = (
        narrowgauge.quantize((y * up).bfloat16(), recipe, scale=scale).codes
        for y in (torch.nn.functional.silu(gate), torch.nn.functional.silu(gate).bfloat16().float())
    )
    narrowgauge.assert_result(silu_mul_quantize_static, twice, x, scale, recipe=recipe)
    narrowgauge.assert_result(silu_mul_quantize_static, once, x, scale, recipe=recipe, rounded="result")
    with pytest.raises(narrowgauge.WrongResult):
        narrowgauge.assert_result(silu_mul_quantize_static, once, x, scale, recipe=recipe)


@pytest.mark.long
def test_the_command_of_a_failure_repeats_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fresh process, from the steps alone: the file of the contract is not there."""
    monkeypatch.setenv("NARROWGAUGE_FAILURES", str(tmp_path))
    x, w = inputs(4, 64)
    with pytest.raises(narrowgauge.WrongResult) as raised:
        narrowgauge.assert_result(rmsnorm_quantize, rmsnorm(x, w, "1 + w"), x, w, recipe=RECIPE, diagnose="full")
    command = raised.value.verdict.reproduction
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert "the factor is 1 + weight" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"result": torch.ones(3)}, ValueError, ["quantized", "codes"]),
        ({"result": {"code": 1}}, ValueError, ["code", "codes, scales"]),
        ({"result": ()}, ValueError, ["codes, scales", "0 parts"]),
        ({"result": {}}, ValueError, ["empty", "codes"]),
        ({"x": torch.ones(4, 64)}, ValueError, ["axis K", "64", "1024"]),
        ({"x": torch.ones(4)}, ValueError, ["x is float32 (M, K)", "(4,)"]),
        ({"x": torch.ones(4, 64, dtype=torch.float64)}, TypeError, ["x", "float64"]),
        ({"recipe": None}, TypeError, ["recipe"]),
        ({"recipe": "nvfp5"}, ValueError, ["nvfp5"]),
        ({"depth": 3}, TypeError, ["depth", "eps, rounded"]),
        ({"contract": rmsnorm}, TypeError, ["@contract"]),
        ({"contract": silu_mul_quantize}, TypeError, ["1 tensors", "2"]),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_judged(arguments: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    x, w = inputs()
    given = {"contract": rmsnorm_quantize, "result": rmsnorm(x, w), "x": x, "w": w, "recipe": RECIPE} | arguments
    options = {name: given[name] for name in ("recipe", "depth") if given.get(name) is not None}
    with pytest.raises(error) as raised:
        narrowgauge.assert_result(given["contract"], given["result"], given["x"], given["w"], **options)
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_contract_that_determines_nothing_is_refused() -> None:
    @c.contract
    def difference(x: c.Matrix):
        z = c.float32(x)
        return c.cast(z - c.tanh(z, "approximate"), x.dtype)

    x = torch.linspace(2.0**-9, 2.0**-8, 512).view(2, 256).half()
    with pytest.raises(ValueError, match="almost anything"):
        narrowgauge.assert_result(difference, (x.float() - x.float().tanh()).half(), x)
    with pytest.raises(narrowgauge.WrongResult):  # a wrong element is wrong
        narrowgauge.assert_result(difference, x, x)


def test_a_scale_between_two_candidates_is_wrong() -> None:
    """The amax of a row is one of a few numbers of bfloat16; a scale between their scales is the scale of none."""
    x, w = inputs(256, 1024)
    q = rmsnorm(x, w)
    program = rmsnorm_quantize.trace(dict.fromkeys(("x", "weight"), "bfloat16"), {"recipe": RECIPE}, {})
    part = dict(judged(program, {"x": x, "weight": w}, {"quantized": q}))["scales"]
    row = int((part.lower < part.upper).nonzero()[0, 0])
    for scale, right in ((part.lower, True), (part.upper, True), ((part.lower + part.upper) / 2, False)):
        scales = q.scales.clone()
        scales[row] = scale[row]
        found = dict(judged(program, {"x": x, "weight": w}, {"quantized": replace(q, scales=scales)}))["scales"]
        assert bool(found.wrong.any()) is not right
