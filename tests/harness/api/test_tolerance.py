"""Expected error and tolerance of a GEMM."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import narrowgauge
from narrowgauge.harness.cli.commands import app
from narrowgauge.native import ops as native
from tests.harness.pages import LOOKS, needs_axe, violations
from tests.native.gpu import needs_compiler

SHAPE = (40, 512, 24)


def intervals(recipe: str = "mxfp8-e4m3", **options: object) -> list:  # type: ignore[type-arg]
    return list(narrowgauge.tolerance(SHAPE, recipe, **options).intervals)  # type: ignore[arg-type]


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("recipe", ["mxfp8-e4m3", "fp8-current-e4m3"])
def test_needed_tolerances_accept_a_correct_kernel(recipe: str) -> None:
    x, w = narrowgauge.inputs(recipe, (32, 512, 24), "normal", operation="gemm")
    a, b = (native.quantize(operand, recipe) for operand in (x, w))
    kernel, expected = (gemm(a, b, out_dtype=torch.float32).double() for gemm in (native.gemm, narrowgauge.gemm))
    (found,) = intervals(recipe, out_dtype=torch.float32)
    difference = (kernel - expected).abs()
    assert bool((difference > 0).any()), "the kernel adds in another order"
    assert bool((difference <= found.rtol * expected.abs()).all())
    assert bool((difference <= found.atol).all())


def test_needed_tolerances_are_the_smallest() -> None:
    x, w = narrowgauge.inputs("mxfp8-e4m3", (32, 512, 24), "normal", operation="gemm")
    a, b = (narrowgauge.quantize(operand, "mxfp8-e4m3") for operand in (x, w))
    expected = narrowgauge.gemm(a, b, out_dtype=torch.bfloat16).double()
    ends = [end.double() for end in narrowgauge.bounds(a, b, out_dtype=torch.bfloat16)]
    distance = torch.maximum(ends[1] - expected, expected - ends[0])
    (found,) = intervals()
    assert found.atol == float(distance.max()) > 0
    assert found.exact == float((ends[0] == ends[1]).double().mean())
    assert math.isclose(found.rtol, float((distance / expected.abs()).max()))


def test_a_simulated_order_has_one_correct_output() -> None:
    any_order, given = intervals(order="aligned-25-16")
    assert (given.exact, given.largest_ulp, given.order) == (1.0, 0, "aligned-25-16")
    assert any_order.exact < 1
    assert any_order.largest_ulp > 0


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [((4, 4), {}, "M, K and N"), ((4, 0, 4), {}, "positive"), (SHAPE, {"rows": 0}, "row"),
     (SHAPE, {"order": "aligned"}, "order"), (SHAPE, {"family": "normale"}, "normal")],
)  # fmt: skip
def test_bad_arguments_are_named(shape: tuple[int, ...], options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        narrowgauge.tolerance(shape, "nvfp4", **options)  # type: ignore[arg-type]


COMMAND = ("tolerance", "--shape", "8x64x8", "--recipe", "nvfp4", "--family", "normal")


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*COMMAND, *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_every_option_changes_the_output() -> None:
    outputs = [
        run(), run("--out-dtype", "fp32"), run("--out-dtype", "bf16,fp16"), run("--order", "aligned-13-32"),
        run("--seed", "1"), run("--rows", "4"), run("--shape", "8x128x8"), run("--recipe", "mxfp8-e4m3"),
        run("--family", "outliers"),
        *(run("--format", form) for form in ("markdown", "csv", "json", "html")),
    ]  # fmt: skip
    assert len(set(outputs)) == len(outputs)
    assert max(len(line) for line in outputs[0].splitlines()) <= 80
    (found,) = json.loads(run("--format", "json"))
    assert found["shape"] == [8, 64, 8]
    assert f"{found['sqnr_db']:.1f}" in outputs[0]


@needs_axe
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_accessibility_of_the_page(width: int, dark: bool, tmp_path: Path) -> None:
    page = tmp_path / "tolerance.html"
    page.write_text(run("--out-dtype", "bf16,fp32", "--order", "aligned-13-32", "--format", "html"), encoding="utf-8")
    assert violations(page, tmp_path, width, dark=dark) == ("", [])


def test_the_page_has_every_interval_in_plot_and_table() -> None:
    found = narrowgauge.tolerance((8, 64, 8), "nvfp4", order="aligned-13-32")
    html = run("--order", "aligned-13-32", "--format", "html")
    for interval in found.intervals:
        cells = [interval.order, f"{100 * interval.exact:.1f} %", f"{interval.rtol:.1e}", f"{interval.atol:.1e}"]
        row = next(
            line for line in html.splitlines() if line.startswith("<tr>") and f"<td>{interval.order}</td>" in line
        )
        assert all(f">{cell}</td>" in row for cell in cells)
        assert all(f"<title>{each.library}: {each.ulp} ulp</title>" in html for each in interval.libraries)
    assert html.count("normal, any order") == html.count("normal, given order") == 1
    assert html.count('<circle class="point" cx=') == len(found.intervals) + 1  # and the legend's


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--shape", "8x8"), "MxKxN"), (("--out-dtype", "bf8"), "bf8"), (("--recipe", "nvfp5"), "nvfp5")],
)
def test_bad_options_end_with_usage_status(arguments: tuple[str, str], words: str) -> None:
    done = CliRunner().invoke(app, [*COMMAND, *arguments])
    assert done.exit_code == 2
    assert words in done.output
