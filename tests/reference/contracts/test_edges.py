"""Correct kernels at the edges of float32: overflow, signed zeros, NaN, tiny divisors, and results that are shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.contract import Contract

INF, NAN = torch.inf, torch.nan


def judged(function: Callable[..., Any], result: Any, *inputs: torch.Tensor, **options: Any) -> narrowgauge.Verdict:
    contract: Contract = c.contract(function)
    return narrowgauge.explain(narrowgauge.assert_result, contract, result, *inputs, **options)


def normalized(x: c.Matrix, recipe: c.Recipe):
    z = c.float32(x)
    return c.quantize(z * c.rsqrt(c.mean(c.square(z)) + 1e-6), recipe)


@pytest.mark.parametrize(
    "recipe", ["fp8-current-e4m3@vllm", "fp8-current-e4m3@torchao", "fp8-row-e4m3", "mxfp8-e4m3", "nvfp4"]
)
def test_a_hidden_float32_amax(recipe: str) -> None:
    """One scale of the whole tensor, and scales of blocks, of numbers that no cast rounds."""
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    for z in (x.float(), x.double()):
        y = (z * torch.rsqrt((z * z).mean(1, keepdim=True) + 1e-6)).float()
        assert judged(normalized, narrowgauge.quantize(y, recipe), x, recipe=recipe).passed


@pytest.mark.parametrize("scale", [0.5, -1.0, 0.0, INF, NAN])
def test_every_given_scale(scale: float) -> None:
    """A negative scale turns the order of codes around."""

    def static(x: c.Matrix, s: c.Scale):
        z = c.float32(x)
        return c.quantize(c.cast(z * c.rsqrt(c.mean(c.square(z))), x.dtype), "fp8-static-e4m3@vllm", s)

    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    given = torch.tensor([scale])
    for z in (x.float(), x.double()):
        y = (z * torch.rsqrt(z.square().mean(1, keepdim=True))).bfloat16()
        codes = narrowgauge.quantize(y, "fp8-static-e4m3@vllm", scale=given).codes
        assert judged(static, codes, x, given).passed
        assert scale not in (0.5, -1.0) or not judged(static, codes ^ 0x80, x, given).passed


def added(x: c.Matrix):
    z = c.float32(x)
    return {"y": c.cast(c.mean(z), "float32")}


def differs(x: c.Matrix, y: c.Matrix):
    a, b = c.float32(x), c.float32(y)
    return c.cast(a * a - b * b * 1.5, x.dtype)


def relu_of_product(x: c.Matrix, y: c.Matrix):
    return c.cast(c.maximum(c.float32(x) * c.float32(y), 0.0), x.dtype)


def divided(x: c.Matrix, y: c.Matrix):
    return c.cast(c.float32(x) / c.float32(y), x.dtype)


def inverse_root(x: c.Matrix):
    return c.cast(c.rsqrt(c.float32(x)), x.dtype)


def exponential(x: c.Matrix):
    return c.cast(c.exp(c.float32(x)), x.dtype)


def chosen(x: c.Matrix):
    z = c.float32(x)
    return c.cast(c.where(z > 0, 0.0, -0.0), x.dtype)


def matrix(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("function", "inputs", "right"),
    [
        (added, [matrix(2.0**127, 2.0**127)], [[INF], [2.0**127]]),
        (differs, [matrix(2e19), matrix(2e19)], [[NAN], [-INF], [INF]]),
        (relu_of_product, [matrix(-1e-30), matrix(1e-30)], [[0.0], [-0.0]]),
        (divided, [matrix(1e-39, 0.0), matrix(1e-39, 1e-39)], [[INF, NAN], [1.0, 0.0]]),
        (inverse_root, [matrix(-0.0, 0.0)], [[-INF, INF]]),
        (exponential, [matrix(INF, -INF, 0.0)], [[INF, 0.0, 1.0]]),
        (chosen, [matrix(1.0, -1.0)], [[0.0, -0.0]]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_every_right_result_passes(
    function: Callable[..., Any], inputs: list[torch.Tensor], right: list[list[float]]
) -> None:
    # Beside rows of ones: a matrix of these elements alone is refused, since no element would be judged.
    ones = {added: 1.0, differs: -0.5, relu_of_product: 1.0, divided: 1.0, inverse_root: 1.0, exponential: math.e}
    dtype = torch.float32 if function is added else torch.bfloat16
    given = [torch.cat([x, torch.ones(800, x.shape[1], dtype=x.dtype)]) for x in inputs]
    for values in right:
        row = torch.tensor([values], dtype=dtype)
        result = torch.cat([row, torch.full((800, len(values)), ones.get(function, 0.0), dtype=dtype)])
        verdict = judged(function, {"y": result} if function is added else result, *given)
        assert verdict.passed, (values, str(verdict))


@pytest.mark.parametrize(
    ("function", "inputs", "wrong"),
    [
        (exponential, [matrix(INF, -INF, 0.0)], [[7.0, 0.0, 1.0], [INF, 0.5, 1.0], [INF, NAN, 1.0]]),
        (chosen, [matrix(1.0, -1.0)], [[0.0, 0.0]]),
        (relu_of_product, [matrix(-1.0), matrix(1.0)], [[-1.0]]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_wrong_results_fail(function: Callable[..., Any], inputs: list[torch.Tensor], wrong: list[list[float]]) -> None:
    for values in wrong:
        assert not judged(function, torch.tensor([values], dtype=torch.bfloat16), *inputs).passed, values


def test_a_zero_row_has_an_infinite_inverse_root() -> None:
    def roots(x: c.Matrix):
        return {"r": c.rsqrt(c.sum(c.square(c.float32(x))))}

    assert judged(roots, {"r": torch.tensor([[INF]])}, matrix(0.0, -0.0)).passed


def test_a_kernel_goes_on_with_a_wider_number_than_it_shows() -> None:
    def two(x: c.Matrix, y: c.Matrix):
        p = c.float32(x) * c.float32(y)
        return {"p": p, "s": p - c.float32(y)}

    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 64, 64, generator=draw)
    p = x.double() * y.double()
    assert judged(two, {"p": p.float(), "s": (p - y.double()).float()}, x, y).passed
    assert not judged(two, {"p": p.float(), "s": (p - 1.001 * y.double()).float()}, x, y).passed


def test_an_amax_that_may_be_nan() -> None:
    def product(x: c.Matrix, y: c.Matrix, recipe: c.Recipe):
        return c.quantize(c.cast(c.exp(c.float32(x)) * c.float32(y), x.dtype), recipe)

    x, y = torch.zeros(2, 1, 16).bfloat16()
    x[0, 3], y[0, 3], y[0, 5] = -110.0, INF, 2.0  # e^−110 is a number in float64, and 0 in float32
    for z in (x.float(), x.double()):
        q = narrowgauge.quantize((z.exp() * y).bfloat16(), "nvfp4@te-reference")
        verdict = judged(product, q, x, y, recipe="nvfp4@te-reference")
        assert verdict.passed, str(verdict)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0, 0)])
def test_empty_matrices(shape: tuple[int, int]) -> None:
    x = torch.zeros(shape).bfloat16()
    assert judged(normalized, narrowgauge.quantize(x.float(), "mxfp8-e4m3"), x, recipe="mxfp8-e4m3").passed


def test_two_casts_of_a_number_are_two_steps() -> None:
    def both(x: c.Matrix):
        z = c.float32(x) * 3.0
        return {"a": c.cast(z, "bfloat16"), "b": c.cast(z, "float16")}

    x = matrix(1.0, 2.0)
    assert judged(both, {"a": (x.float() * 3).bfloat16(), "b": (x.float() * 3).half()}, x).passed


def silu_mul_quantize(x: c.Matrix, recipe: c.Recipe):
    gate, up = c.halves(x)
    return c.quantize(c.cast(c.silu(c.float32(gate)) * c.float32(up), x.dtype), recipe)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-current-e4m3"])
def test_a_hidden_amax_is_one_number_for_all_blocks(recipe: str) -> None:
    """The largest element is a tie in float32, and above it in float64: each amax has codes of its own."""
    gate, up = torch.full((4, 64), 2.0**-32), torch.ones(4, 64)
    gate[2, 5], up[2, 5] = (1 + 2.0**-7) * 2.0**-30, 1.5
    x = torch.cat([gate, up], 1).bfloat16()
    y = (torch.nn.functional.silu(gate) * up).bfloat16()
    tie = (1.5 + 2.0**-7 + 2.0**-8) * 2.0**-31
    for neighbour, right in ((-(2.0**-39), True), (2.0**-39, True), (2.0**-32, False)):
        y[2, 5] = tie + neighbour
        q = narrowgauge.quantize(y, recipe)
        assert judged(silu_mul_quantize, (q.codes, q.scales), x, recipe=recipe).passed is right


def fast_exp(x: c.Matrix):
    return c.cast(c.exp(c.float32(x), "__expf"), x.dtype)


def test_fast_exp_of_a_large_argument_is_infinite() -> None:
    x = torch.tensor([[1000.0, 88.0, -1000.0, 3e38, 1.0]]).bfloat16()
    right = torch.exp(x.float()).bfloat16()
    assert judged(fast_exp, right, x).passed
    right[0, 0] = 1.0
    assert not judged(fast_exp, right, x).passed


def times_scale(x: c.Matrix, s: c.Scale):
    return c.cast(c.float32(x) * s * 3.0, x.dtype)


def test_a_scale_is_one_number_for_all_columns() -> None:
    """Some elements are in doubt, and are evaluated by themselves."""
    x, s = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.tensor([0.37])
    for y in (x.float() * s * 3.0, x.double() * s * 3.0):
        assert judged(times_scale, y.to(x.dtype), x, s).passed


ZERO_BLOCKS = (
    "nvfp4@modelopt", "nvfp4@compressed-tensors", "nvfp4@quark", "nvfp4@qwix", "mxfp8-e4m3@mlx",
    "fp8-block-1x128-e4m3-pow2@compressed-tensors",
)  # fmt: skip
"""A recipe per rule for blocks with a scale of 0."""


def weighted_norm(x: c.Matrix, w: c.Row, recipe: c.Recipe):
    z = c.float32(x)
    return c.quantize(z * c.float32(w) * c.rsqrt(c.mean(c.square(z)) + 1e-6), recipe)


@pytest.mark.parametrize("recipe", ZERO_BLOCKS)
def test_hidden_amaxes_of_zero_block_rules(recipe: str) -> None:
    """Amaxes from 0 to infinity: the scale falls once, from that of a zero block, and increases from there on."""
    draw = torch.Generator().manual_seed(1)
    powers = torch.randint(-140, 3, (32, 1), generator=draw).float()
    x = torch.randn(32, 256, generator=draw) * torch.exp2(powers)
    x[3], x[4, :32], x[5, 7], x[6, 9] = 0.0, 0.0, INF, NAN
    w = torch.exp2(torch.randint(-20, 20, (256,), generator=draw).float() / 2)
    w[::64] = 3e38
    for z in (x, x.double()):
        y = (z * w.to(z.dtype) * torch.rsqrt((z * z).mean(1, keepdim=True) + 1e-6)).float()
        q = narrowgauge.quantize(y, recipe)
        assert judged(weighted_norm, q, x, w, recipe=recipe).passed
    x, w = x[7:], torch.exp2(torch.arange(256) / 64)  # a finite amax of the tensor
    q = narrowgauge.quantize((x * w * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)), recipe)
    assert judged(weighted_norm, q, x, w, recipe=recipe).passed
    assert not judged(weighted_norm, (q.codes, q.scales.roll(1, 1), q.amax), x, w, recipe=recipe).passed
