"""What several tests ask of a `Quantized`: that it is the scalar twin's, or another one's, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from narrowgauge.reference.quantize.layout import rowwise_codes, unpack
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe
from tests.golden import bits
from tests.reference import scalar


def elements(q: Quantized) -> torch.Tensor:
    """Codes of `q`, one an element."""
    return unpack(q.codes, q.shape[1])


def assert_same(one: Quantized | None, other: Quantized | None) -> None:
    """The same codes, scales and amax, bit for bit, of the same shape in the same layout."""
    assert one is not None
    assert other is not None
    assert (one.shape, one.swizzled) == (other.shape, other.swizzled)
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.scales, other.scales)
    for mine, theirs in ((one.amax, other.amax), (one.tensor_scale, other.tensor_scale)):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(bits(mine), bits(theirs))


def rule(recipe: Recipe) -> scalar.Rule:
    """The twin's choices for a recipe."""
    return scalar.Rule(
        dialect="te" if recipe.block_scale == "amax*(enc*(1/6))" else "te-2.8",
        nan=recipe.nan,
        height=recipe.block[0],
        by_row=recipe.granularity == "row",
        most=int(recipe.scale_max),
        error=None if recipe.candidates == "6" else recipe.candidates.removeprefix("4-or-6-"),
    )


def rotated(x: torch.Tensor, group: int, *, signs: bool = True) -> np.ndarray:
    """float32: `x` (M, K), bfloat16, rotated by the twin."""
    groups = x.float().numpy().reshape(-1, group)
    return np.array([scalar.rotate(list(g), signs=signs) for g in groups], np.float32).reshape(x.shape)


def assert_twin(
    q: Quantized, x: torch.Tensor, *, amax: torch.Tensor | None = None, words: torch.Tensor | np.ndarray | None = None
) -> None:
    """`q` is what the scalar twin makes of `x` by the recipe of `q`."""
    turn = q.recipe.transform
    matrix = x.float().numpy() if turn is None else rotated(x, turn.group, signs=turn.signs != 0)
    random = None if words is None else scalar.random_bytes(np.asarray(words).astype(np.int64) & 0xFFFFFFFF)
    given = None if amax is None else amax.numpy()
    codes, scales, own = scalar.quantize(matrix, rule(q.recipe), amax=given, random=random)
    np.testing.assert_array_equal(q.scales.numpy(), scales)
    np.testing.assert_array_equal(q.codes.numpy(), codes)
    np.testing.assert_array_equal(q.amax, own)


def rowwise_elements(q: Quantized) -> torch.Tensor:
    """Codes (M, K) of `q`, one an element, along its rows, however it holds them."""
    codes = rowwise_codes(q)
    return unpack(codes, q.shape[1]) if q.recipe.element.bits == 4 else codes
