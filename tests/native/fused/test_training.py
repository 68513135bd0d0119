"""Forms of training of fused kernels, on inputs whose results are exact: the bytes are those of `quantize_both`.

Other inputs are judged by the shipped contracts, in the quick tier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from narrowgauge.reference import ops as reference
from tests.native.devices import ON_EVERY_DEVICE, ops
from tests.native.samples import assert_same

SHAPES = ((3, 64), (70, 208), (64, 128), (5, 24), (130, 18), (0, 64), (2, 0))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RECIPES = ("mxfp8-e4m3", "mxfp8-2d", "mxfp4", "mxfp6-e2m3", "nvfp4", "nvfp4-2d", "nvfp4-4over6-448-mae")
FORWARD = ("rmsnorm_quantize_both", "silu_mul_quantize_both")
BACKWARD = ("rmsnorm_backward_quantize_both", "silu_mul_backward_quantize_both")


def matrices(shapes: tuple[tuple[int, int], ...] = SHAPES, dtypes: Any = DTYPES) -> Iterator[torch.Tensor]:
    """Odd integers times powers of two by column: products with ±1 and powers of two are exact."""
    for number, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(number)
        integers = 2 * torch.randint(-31, 31, shape, generator=generator) + 1
        powers = torch.exp2(torch.randint(-3, 4, (shape[1],), generator=generator))
        yield (integers * powers).to(dtypes[number % len(dtypes)])


def signs(y: torch.Tensor) -> torch.Tensor:
    return (1 - 2 * (torch.arange(y.shape[1]) % 2)).expand(y.shape).to(y.dtype)


def forward(name: str, y: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], dict[str, Any], torch.Tensor]:
    """Operands whose result is the matrix: rows of ±1 have the norm 1, and SiLU of 32 is 32."""
    if name.startswith("silu"):
        return (torch.cat([torch.full_like(y, 32.0), y / 32], dim=1),), {}, y
    weight = y[0] if len(y) else torch.ones(y.shape[1], dtype=y.dtype)
    return (signs(y), weight), {"eps": 0.0}, signs(y) * weight


def backward(name: str, y: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """Operands, the gradient, and the terms of the sum over the rows. The slope of SiLU at 32 is 1, and a row of x
    whose products with dy cancel has no projection."""
    if name.startswith("silu"):
        gradient = torch.cat([y / 8, y * 32], dim=1)
        return (y, torch.cat([torch.full_like(y, 32.0), torch.full_like(y, 0.125)], dim=1)), gradient, gradient
    dy = y[:, ::2].repeat_interleave(2, dim=1)
    return (dy, signs(y), torch.ones(len(y), 1), torch.ones(y.shape[1])), dy, dy * signs(y)


def assert_both(found: dict[str, Any], y: torch.Tensor, recipe: str, random: Any = None) -> None:
    for name, wanted in zip(("rowwise", "columnwise"), reference.quantize_both(y, recipe, random=random), strict=True):
        assert_same(found[name], wanted)


@pytest.mark.sampled(85)
@ON_EVERY_DEVICE
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FORWARD)
def test_both_orientations_of_exact_products(name: str, recipe: str) -> None:
    for matrix in matrices():
        operands, options, y = forward(name, matrix)
        assert_both(getattr(ops, name)(*operands, recipe, **options), y, recipe)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("recipe", ["mxfp8-e4m3", "nvfp4"])
@pytest.mark.parametrize("name", BACKWARD)
def test_exact_gradients_and_their_sums(name: str, recipe: str) -> None:
    for matrix in matrices():
        operands, gradient, terms = backward(name, matrix)
        found = getattr(ops, name)(*operands, recipe)
        total = found["dweight" if name.startswith("rmsnorm") else "dbias"]
        assert torch.equal(total, terms.double().sum(0).to(total.dtype))
        assert_both(found, gradient, recipe)
        plain = getattr(ops, name.removesuffix("_quantize_both"))(*operands)
        assert torch.equal(plain["dx"] if isinstance(plain, dict) else plain, gradient)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("recipe", ["nvfp4-rht", "nvfp4-rht-nosign"])
@pytest.mark.parametrize("name", FORWARD)
def test_rotations(name: str, recipe: str) -> None:
    for matrix in matrices(((32, 64), (80, 208)), (torch.bfloat16,)):
        operands, options, y = forward(name, matrix)
        assert_both(getattr(ops, name)(*operands, recipe, **options), y, recipe)
        alone = getattr(ops, name.removesuffix("_both"))(*operands, recipe, **options)
        assert_same(alone, reference.quantize(y, recipe))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("recipe", ["nvfp4-rht-sr", "mxfp8-e4m3-sr"])
def test_stochastic_rounding_by_given_bits(recipe: str) -> None:
    for matrix in matrices(((32, 64), (80, 96)), (torch.bfloat16,)):
        generator = torch.Generator().manual_seed(0)
        (dy, x), y, _ = backward("silu", matrix)
        rows, columns = y.shape
        random = [torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)
                  for shape in ((rows, columns // 4), (columns, rows // 4))]  # fmt: skip
        found = ops.silu_mul_backward_quantize_stochastic(dy, x, *random, recipe)
        assert_both(found, y, recipe, tuple(random))


@ON_EVERY_DEVICE
def test_views_of_the_operands() -> None:
    for matrix in matrices():
        for name in FORWARD:
            operands, options, y = forward(name, matrix)
            views = [torch.stack([a, a], dim=-1)[..., 0] for a in operands]
            assert_both(getattr(ops, name)(*views, "mxfp8-e4m3", **options), y, "mxfp8-e4m3")


def test_options_change_the_result() -> None:
    x, weight = torch.linspace(-2, 3, 64).expand(2, 64).bfloat16(), torch.full((64,), 0.3)
    plain = ops.rmsnorm_quantize_both(x, weight, "mxfp8-e4m3")["rowwise"]
    for options in ({"eps": 1.0}, {"zero_centered": True}):
        assert not torch.equal(
            plain.codes, ops.rmsnorm_quantize_both(x, weight, "mxfp8-e4m3", **options)["rowwise"].codes
        )
    gradients = [ops.rmsnorm_backward(x, x, torch.ones(2, 1), weight, zero_centered=z)["dx"] for z in (False, True)]
    assert not torch.equal(*gradients)


def test_errors_name_the_operand_and_the_remedy() -> None:
    x, weight = torch.zeros(2, 64), torch.zeros(64)
    with pytest.raises(ValueError, match=r"rs has shape \(2, 1\), not \(2,\)"):
        ops.rmsnorm_backward(x, x, torch.ones(2), weight)
    with pytest.raises(ValueError, match=r"dy has shape \(2, 32\)"):
        ops.silu_mul_backward(x, x)
    with pytest.raises(ValueError, match=r"\(2, 63\) has an odd number of columns; gate and up"):
        ops.silu_mul_quantize_both(torch.zeros(2, 63), "mxfp8-e4m3")
    with pytest.raises(NotImplementedError, match="not by fp8-block-1x128-e4m3-pow2; make the matrix first"):
        ops.silu_mul_quantize_both(x, "fp8-block-1x128-e4m3")
    with pytest.raises(TypeError, match="rotates bfloat16"):
        ops.rmsnorm_quantize_both(x, weight, "nvfp4-rht")
    with pytest.raises(ValueError, match="it takes no random bits"):
        ops.rmsnorm_quantize_stochastic(x, weight, torch.zeros(2, 16, dtype=torch.int32), "mxfp8-e4m3")
