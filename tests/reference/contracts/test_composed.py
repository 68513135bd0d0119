"""Norms and softmax as composed steps, reductions of the first axis, and rotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from narrowgauge import contract as c
from narrowgauge.reference.contracts import sums
from narrowgauge.reference.contracts.accepted import Part
from narrowgauge.reference.contracts.casts import cast
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.reference.contracts.interval import Interval, divide, exactly, multiply, square
from narrowgauge.reference.contracts.sums import rotated
from narrowgauge.reference.high_precision.norm import norm_forward
from narrowgauge.reference.quantize.hadamard import transform
from narrowgauge.spec.recipes import find_recipe
from tests.reference.bounds.test_bounds import ordinal
from tests.reference.contracts.contracts import columns, layer_norm
from tests.reference.inside import width

NAN, INF = torch.nan, torch.inf


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def part_of(function: Callable[..., Any], result: torch.Tensor, *inputs: torch.Tensor) -> Part:
    contract = function if isinstance(function, c.Contract) else c.contract(function)
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    program = contract.trace(dict.fromkeys(contract.tensors, dtype), {}, {})
    return dict(judged(program, dict(zip(contract.tensors, inputs, strict=True)), {"output": result}))["output"]


def rms_norm(x: c.Matrix, weight: c.Row):
    return c.cast(c.rms_norm(c.float32(x), weight, 1e-5), x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mean", [0.0, 8.0])
@pytest.mark.parametrize("size", [64, 1024])
def test_norms_are_as_narrow_as_their_proved_bounds(size: int, mean: float, dtype: torch.dtype) -> None:
    x, w, b = ((drawn(16, size) + mean).to(dtype), drawn(size, seed=1).to(dtype), drawn(size, seed=2).to(dtype))
    for function, given, bound in (
        (layer_norm, (x, w, b), norm_forward(x, w, b, "layer", 1e-5)),
        (rms_norm, (x, w), norm_forward(x, w, None, "rms", 1e-5)),
    ):
        part = part_of(function, bound.value.to(dtype), *given)
        assert not bool(part.wrong.any())
        found = (ordinal(part.upper) - ordinal(part.lower)).double()
        assert float(found.mean()) <= 1.01 * float(width(bound, dtype).mean())


def test_a_variance_in_one_pass_is_outside() -> None:
    """mean x² − m² cancels if the mean is much larger than the deviation."""
    x, w, b = drawn(16, 256) + 4096, torch.ones(256), torch.zeros(256)
    m = x.mean(1, keepdim=True)
    y = (x - m) * ((x * x).mean(1, keepdim=True) - m * m + 1e-5).rsqrt()
    assert int(part_of(layer_norm, y, x, w, b).wrong.sum()) > 100


def test_a_softmax_without_its_maximum_overflows() -> None:
    def softmax(x: c.Matrix):
        return c.cast(c.softmax(c.float32(x)), x.dtype)

    x = drawn(16, 64).bfloat16() * 100
    right, wrong = x.float().softmax(1).bfloat16(), (x.float().exp() / x.float().exp().sum(1, keepdim=True)).bfloat16()
    assert not bool(part_of(softmax, right, x).wrong.any())
    assert bool(part_of(softmax, wrong, x).wrong.any())


@pytest.mark.parametrize(
    ("row", "low", "high", "nan"),
    [
        ([-3.0, -1.0], -1.0, -1.0, False),
        ([-1.0, -0.0, 0.0], -0.0, 0.0, False),
        ([-0.0, -1.0], -0.0, -0.0, False),
        ([NAN, -INF, 2.0], 2.0, 2.0, True),
        ([INF, 1.0], INF, INF, False),
    ],
)
def test_the_largest_number_of_a_row(row: list[float], low: float, high: float, nan: bool) -> None:
    found = sums.largest(exactly(torch.tensor([row])))
    assert [str(float(end)) for end in (found.low, found.high)] == [str(low), str(high)]
    assert bool(found.may_be_nan) == nan


def test_a_row_of_zeros_has_no_error_of_merges() -> None:
    zeros = exactly(torch.zeros(2, 8))
    for squares in (False, True):
        found = sums.merged(sums.mean(zeros), zeros, squares=squares)
        assert not bool(found.low.any() | found.high.any())


def test_another_statistic_does_not_reach_the_right_one() -> None:
    """A contract with a changed mean accepts numbers about this mean alone."""
    x = exactly(drawn(4, 64))
    for squares in (False, True):
        found = sums.merged(exactly(torch.full((4, 1), 5.0)), x, squares=squares)
        assert bool(((found.low > 4.99) & (found.high < 5.01)).all())


def test_a_variance_that_overflows_may_be_anything_from_0_on() -> None:
    x = exactly(torch.tensor([[3e38, -3e38]]))
    found = sums.merged(sums.mean(square(x)), x, squares=True)
    assert (float(found.low), float(found.high), bool(found.may_be_nan)) == (0.0, INF, True)


def test_a_number_of_any_size_times_zero_may_be_zero() -> None:
    anything, zero = Interval(torch.tensor([-INF]).double(), torch.tensor([INF]).double()), exactly(torch.zeros(1))
    infinity = exactly(torch.tensor([INF]))
    for found in (multiply(anything, zero), divide(anything, infinity, "quotient")):
        assert (float(found.low), float(found.high), bool(found.may_be_nan)) == (0.0, 0.0, True)
    assert bool(multiply(infinity, zero).never)


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "largest"])
def test_an_axis_is_the_last_or_the_first_of_a_matrix(name: str) -> None:
    def of_row(x: c.Matrix, w: c.Row):
        return getattr(c, name)(c.float32(w), axis=0)

    def of_matrix(x: c.Matrix):
        return getattr(c, name)(c.float32(x), axis=1)

    for function, words in ((of_row, "axis 0 of (K)"), (of_matrix, "axis 1 of (M, K)")):
        contract = c.contract(function)
        with pytest.raises(c.ContractError) as raised:
            contract.trace(dict.fromkeys(contract.tensors, "float32"), {}, {})
        assert f"c.{name} along {words}; the axis is -1, or 0 of a matrix" in str(raised.value)


def test_reductions_of_rows_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that is evaluated in slabs of rows has the sums of all rows."""
    monkeypatch.setattr("narrowgauge.reference.contracts.evaluate._SLAB", 64)
    z = drawn(48, 32)
    x = z.bfloat16()
    program = columns.trace({"x": "bfloat16"}, {}, {})
    wide = x.double()
    shown = {
        "total": wide.sum(0), "mean": wide.mean(0), "amax": wide.abs().amax(0), "largest": wide.amax(0),
        "rest": wide - wide.mean(0),
    }  # fmt: skip
    parts = dict(judged(program, {"x": x}, {name: value.bfloat16() for name, value in shown.items()}))
    assert list(parts) == list(shown)
    assert not any(bool(part.wrong.any()) for part in parts.values())


@pytest.mark.parametrize("recipe", ["nvfp4-rht", "nvfp4-rht-nosign", "nvfp4-rht32"])
def test_a_rotation_of_intervals_holds_every_rotated_number(recipe: str) -> None:
    rotation = find_recipe(recipe).transform
    assert rotation is not None
    low = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    high = low + low.abs() / 8
    found = rotated(Interval(low.double(), high.double()), rotation.group, rotation.signs)
    for seed in range(8):
        some = torch.rand(8, 64, generator=torch.Generator().manual_seed(seed)) < 0.5
        inside = transform(torch.where(some, low, high), recipe).double()
        near = inside.abs() * 2.0**-8  # transform rounds to bfloat16
        assert bool(((found.low - near <= inside) & (inside <= found.high + near)).all())
    ends = cast(rotated(exactly(low), rotation.group, rotation.signs), "bfloat16")
    turned = transform(low, recipe).double()
    assert bool(((ends.low <= turned) & (turned <= ends.high)).all())
    assert float((ends.low == ends.high).double().mean()) > 0.95
