"""`narrowgauge doctor --functions`: the figures of functions with known errors, on a CPU."""

from __future__ import annotations

import math

import pytest
import torch
from typer.testing import CliRunner

from narrowgauge.harness.cli import app
from narrowgauge.harness.tools.doctor import functions
from narrowgauge.harness.tools.doctor.functions import Divisions, Errors, arguments, bounds, source
from tests.native import nvrtc


def measured(result: torch.Tensor, x: torch.Tensor, exact: torch.Tensor, rising: int = 1) -> Errors:
    errors = Errors("f")
    errors.add(x, result, exact, rising)
    return errors


def test_all_arguments_come_once_in_the_order_of_bits() -> None:
    chunks = list(bounds(1 << 29))
    assert len(chunks) == 8
    assert chunks[:2] == [(0, 1 << 29), (1 << 29, 1 << 30)]
    assert chunks[-1] == (7 << 29, 1 << 32)
    assert sum(last - first for first, last in chunks) == 1 << 32
    ends = [(0, 2), ((1 << 31) - 2, 1 << 31), (1 << 31, (1 << 31) + 1), ((1 << 32) - 1, 1 << 32)]
    bits = [[bit & 0xFFFFFFFF for bit in arguments(*end, "cpu").view(torch.int32).tolist()] for end in ends]
    assert bits == [
        [0, 1, 2], [0x7FFFFFFE, 0x7FFFFFFF, 0x7FFFFFFF], [0x80000000, 0x80000001], [0xFFFFFFFF, 0xFFFFFFFF],
    ]  # fmt: skip


def test_figures_of_a_rounded_function() -> None:
    x = torch.arange(0x3F000000, 0x3F000000 + 4097, dtype=torch.int32).view(torch.float32)
    exact = x.double() / 3
    found = measured(exact.float(), x, exact)
    assert (found.of, found.correctly_rounded, found.ulp_from_correctly_rounded) == (4096, 4096, 0)
    assert 0.33 < found.ulp_of_exact <= 0.5
    assert found.not_monotone == 0


def test_figures_of_wrong_results() -> None:
    x = torch.arange(0x3F800000, 0x3F800000 + 129, dtype=torch.int32).view(torch.float32)
    result = x.clone()
    result[5] += 3 * 2.0**-23
    found = measured(result, x, x.double())
    assert found.ulp_from_correctly_rounded == 3
    assert found.ulp_of_exact == 3
    assert found.not_monotone == 1
    assert found.correctly_rounded == 127
    assert found.absolute_near_1 == 3 * 2.0**-23
    assert found.relative == 3 * 2.0**-23 / float(x[5])
    assert found.as_json()["relative_log2"] == round(math.log2(found.relative), 4)


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_result_that_is_no_number_is_an_infinite_error(wrong: float) -> None:
    x = torch.tensor([1.0, 1.5, 2.0])
    found = measured(torch.tensor([1.0, wrong, 2.0]), x, x.double())
    assert found.relative == found.ulp_of_exact == found.absolute_near_1 == math.inf


def test_a_logarithm_has_an_absolute_error_near_1() -> None:
    x = torch.tensor([1.25, 4.0, 8.0])
    exact = torch.log2(x.double())
    result = exact.float()
    result[0] += 2.0**-20
    for is_logarithm in (False, True):
        found = Errors("f", is_logarithm=is_logarithm)
        found.add(x, result, exact, 1)
        assert (found.ulp_of_exact > 1) is not is_logarithm
        assert (found.ulp_from_correctly_rounded > 1) is not is_logarithm
        assert found.absolute_near_1 > 2.0**-21


def test_a_decreasing_function_and_negative_arguments() -> None:
    for sign, rising in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        x = sign * torch.arange(0x3F800000, 0x3F800000 + 65, dtype=torch.int32).view(torch.float32)
        exact = rising * x.double()
        assert measured(exact.float(), x, exact, rising).not_monotone == 0
        assert measured(exact.float(), x, exact, -rising).not_monotone == 64


def test_flushed_and_special_results_are_counted_apart() -> None:
    x = torch.tensor([1.0, 2.0, 4.0, math.inf, math.nan, 2.0**-130, 8.0])
    exact = torch.tensor([2.0**-140, 2.0**-130, 3.0, 1.0, math.nan, 1.0, 1.0], dtype=torch.float64)
    result = torch.tensor([0.0, 2.0**-130, 3.0, 1.0, math.nan, 1.0, 1.0])
    found = measured(result, x, exact)
    assert (found.of, found.subnormal_results, found.flushed) == (1, 2, 1)


def test_zeros_that_round_to_0_are_not_flushed() -> None:
    x = torch.tensor([0.0, -0.0, -149.5, -150.0, -1000.0, 1.0])
    found = measured(torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 2.0]), x, torch.exp2(x.double()))
    assert (found.of, found.subnormal_results, found.flushed) == (2, 1, 1)


def test_quotients_of_a_product_with_the_reciprocal() -> None:
    a, b = torch.rand(1000) + 1, torch.rand(1000) + 1
    product = a * (1 / b)
    found = Divisions()
    found.add("div.full.f32", product, a / b, product)
    assert found.products["div.full.f32"] == 1000
    assert 0 < found.not_rounded["div.full.f32"] < 1000
    assert found.largest_ulp["div.full.f32"] == 1
    assert found.largest_ulp["div.approx.f32"] == 0


def test_every_function_compiles(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(nvrtc.sources, "text", lambda _: source())
    text = nvrtc.ptx("functions", "compute_90")
    assert text.count(".entry") == len(functions._TABLE) + len(functions._DIVISIONS)
    for name in [*functions._TABLE, *functions._DIVISIONS]:
        assert name in text or not name.endswith(".f32")


def test_the_command_says_what_is_missing() -> None:
    result = CliRunner().invoke(app, ["doctor", "--save", "errors.json"])
    assert (result.exit_code, "give --functions too" in result.output) == (2, True)
    if not torch.cuda.is_available():
        result = CliRunner().invoke(app, ["doctor", "--functions"])
        assert (result.exit_code, "measures a GPU" in result.output) == (2, True)
