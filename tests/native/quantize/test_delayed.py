"""update_scale: the results of exact arithmetic, a tensor at a time, and of the reference."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowgauge.reference.scalar.rounding import nearest
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.native.devices import ON_EVERY_DEVICE, ops
from tests.native.samples import FP8_NAMES, assert_equal

pytestmark = ON_EVERY_DEVICE
f32 = np.float32
FLT_MAX = float(np.finfo(f32).max)

NAMES = (
    *(name for name in FP8_NAMES if find_recipe(name).delayed is not None),
    "fp8-delayed-e4m3-margin1", "fp8-delayed-e5m2-recent-margin3-bulk", "fp8-delayed-e4m3-margin130",
)  # fmt: skip
EVERY_RECIPE = pytest.mark.parametrize("name", NAMES)

AMAXES = (
    0.0, -0.0, 1e-45, 1e-38, 1.3e-36, 1.5e-36, 0.1, 1.0, 448.0, 57344.0, 1e30, FLT_MAX, math.inf, math.nan, -1.0,
    -math.inf,
)  # fmt: skip
SCALES = (1.0, 0.3, 0.0, 1e-45, FLT_MAX, math.inf, -math.inf, math.nan)


def step(history: list[float], scale: float, r: Recipe) -> tuple[list[float], float]:
    """One tensor."""
    recipe = r.delayed
    assert recipe is not None
    last = history[0]
    kept = recipe.update == "bulk" and last == 0
    amax = last
    if recipe.algorithm == "max":
        amax = max((a for a in history if not math.isnan(a)), default=0.0)
    if not kept and amax > 0 and math.isfinite(amax):
        most = nearest(Fraction(r.element.max) / 2**recipe.margin, "float32")
        scale = nearest(Fraction(most) / Fraction(amax), "float32")
    if math.isinf(scale):
        scale = FLT_MAX
    return (history if kept else [0.0, *history[2:], last] if len(history) > 1 else [0.0]), scale


def histories(length: int, tensors: int, seed: int = 0) -> torch.Tensor:
    """(length, tensors) amaxes, a quarter of them 0, infinite, NaN or extreme, in a quarter of the tensors."""
    generator = torch.Generator().manual_seed(seed + 1000 * length + tensors)
    x = torch.randn(length, tensors, generator=generator).abs() * 2.0 ** torch.randint(
        -120, 100, (length, tensors), generator=generator
    )
    picked = torch.tensor(AMAXES)[torch.randint(len(AMAXES), (length, tensors), generator=generator)]
    where = torch.rand(length, tensors, generator=generator) < 0.25
    where &= torch.rand(tensors, generator=generator) < 0.25
    x = torch.where(where, picked, x)
    x[0] = torch.where(torch.rand(tensors, generator=generator) < 0.25, picked[0], x[0])
    return x


def scales_for(tensors: int, some: tuple[float, ...] = SCALES) -> torch.Tensor:
    return torch.tensor(some).repeat(tensors // len(some) + 1)[:tensors].clone()


@pytest.mark.sampled(2)
@EVERY_RECIPE
def test_every_tensor_has_the_exact_update(name: str) -> None:
    recipe = find_recipe(name)
    for length, tensors in ((1, 1), (1, 40), (2, 33), (3, 5), (7, 64), (8, 100), (9, 31), (40, 65)):
        history, scale = histories(length, tensors), scales_for(tensors)
        new_history, new_scale = ops.update_scale(history, scale, name)
        for tensor in range(tensors):
            expected, factor = step(history[:, tensor].tolist(), float(scale[tensor]), recipe)
            assert_equal(new_history[:, tensor], torch.tensor(expected), f"history {tensor}")
            assert_equal(new_scale[tensor], torch.tensor(factor), f"scale {tensor}")


@pytest.mark.sampled(5)
@EVERY_RECIPE
def test_every_pair_of_amaxes_under_every_scale(name: str) -> None:
    """The last two amaxes: zeros, subnormal, tiny and negative numbers, infinities, NaN."""
    recipe = find_recipe(name)
    cases = [(last, before, scale) for last in AMAXES for before in AMAXES for scale in SCALES]
    table = torch.tensor(cases)
    new_history, new_scale = ops.update_scale(table[:, :2].T, table[:, 2], name)
    for tensor, (last, before, scale) in enumerate(table.tolist()):
        expected, factor = step([last, before], scale, recipe)
        assert_equal(new_history[:, tensor], torch.tensor(expected), f"history {last, before}")
        assert_equal(new_scale[tensor], torch.tensor(factor), f"scale {last, before, scale}")


@pytest.mark.sampled(4)
@EVERY_RECIPE
def test_every_exponent_of_an_amax_has_the_exact_scale(name: str) -> None:
    """Powers of two, also times the mantissa of the largest element, ± 1 ulp."""
    recipe = find_recipe(name)
    exact = np.array(
        [math.ldexp(m, k) for k in range(-149, 128) for m in (1.0, 2 * math.frexp(recipe.element.max)[0])]
    ).astype(f32)
    amaxes = np.unique(np.concatenate([exact, np.nextafter(exact, f32(0)), np.nextafter(exact, f32(math.inf))]))
    amaxes = amaxes[np.isfinite(amaxes)]
    _, scales = ops.update_scale(torch.from_numpy(amaxes).unsqueeze(0), torch.ones(len(amaxes)), name)
    for amax, scale in zip(amaxes.tolist(), scales, strict=True):
        assert_equal(scale, torch.tensor(step([amax], 1.0, recipe)[1]), f"scale of {amax}")


def test_every_choice_of_a_recipe_changes_a_scale() -> None:
    history, scale = torch.tensor([[1.0, 0.0], [3.0, 2.0]]), torch.tensor([7.0, 7.0])
    names = ("fp8-delayed-e4m3", "fp8-delayed-e5m2", "fp8-delayed-e4m3-recent", "fp8-delayed-e4m3-margin2",
             "fp8-delayed-e4m3-bulk")  # fmt: skip
    found = [tuple(ops.update_scale(history, scale, name)[1].tolist()) for name in names]
    assert len(set(found)) == len(names)
