"""FP8 with float32 scales: a twin in exact arithmetic, edges of the scale, halves, sections, errors."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import narrowgauge
from narrowgauge.reference.ops import dequantize, gemm, quantize, quantize_both, quantize_grouped
from narrowgauge.reference.quantize.scaling import encode_scales, tensor_scale
from narrowgauge.reference.scalar import fp8, rounding
from narrowgauge.spec.formats import E4M3, E5M2, Format
from narrowgauge.spec.quantized import Quantized, codes_shape, scales_shape
from narrowgauge.spec.recipes import find_recipe, recipe_names
from tests.golden import bits
from tests.reference.samples import MATRICES, matrix

SETTINGS = settings(max_examples=50, deadline=None, derandomize=True, database=None)
ELEMENTS = pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda fmt: fmt.name)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = [name for name in recipe_names() if "@" not in name and "fnuz" not in name]
BLOCKS = [name for name in NAMES if name.startswith("fp8-block")]
CURRENT = [name for name in NAMES if name.startswith("fp8-current")]
ROWS = [name for name in NAMES if name.startswith("fp8-row")]
WITHOUT_AMAX = ("fp8-block", "fp8-row")
ALL = [*BLOCKS, *CURRENT, *ROWS, "fp8-delayed-e4m3", "fp8-delayed-e5m2"]


def scale_of(name: str) -> torch.Tensor | None:
    return torch.tensor([3.7]) if name.startswith("fp8-delayed") else None


def assert_twin(q: Quantized, x: torch.Tensor, dtype: str) -> None:
    codes, scales = fp8.quantize(x.float().numpy(), q.recipe, dtype)
    np.testing.assert_array_equal(bits(q.scales).numpy(), scales.view(np.int32))
    np.testing.assert_array_equal(q.codes.numpy(), codes)


# Twins.


@SETTINGS
@given(
    name=st.sampled_from([*BLOCKS, *CURRENT, *ROWS]), eps=st.sampled_from(["", "-eps1e-06", "-eps0.5", "-eps300.0"]),
    dtype=st.sampled_from(list(DTYPES)), family=st.sampled_from(MATRICES), seed=st.integers(0, 2**32),
    rows=st.integers(1, 4), columns=st.integers(1, 150),
)  # fmt: skip
def test_a_recipe_is_its_twin(name: str, eps: str, dtype: str, family: str, seed: int, rows: int, columns: int) -> None:
    x = matrix(family, seed, rows, columns).to(DTYPES[dtype])
    assert_twin(quantize(x, name + eps), x, dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(1, 300), (128, 128), (257, 5), (129, 130)])
@pytest.mark.parametrize("name", ["fp8-block-128x128-e4m3-pow2", "fp8-block-128x128-e5m2-fp32", "fp8-block-1x128"])
def test_blocks_at_the_edges_are_of_what_there_is(name: str, shape: tuple[int, int]) -> None:
    x = matrix("spread", 1, *shape)
    q = quantize(x, name)
    assert tuple(q.scales.shape) == scales_shape(shape, q.recipe)
    assert_twin(q, x, "float32")


@pytest.mark.parametrize("width", [16, 32, 64, 256, 512])
def test_groups_of_other_widths(width: int) -> None:
    x = matrix("spread", width, 3, 2 * width + 7)
    q = quantize(x, f"fp8-block-1x{width}-e4m3-fp32")
    assert q.scales.shape == (3, 3)
    assert_twin(q, x, "float32")
    narrowgauge.assert_gemm(q, q, gemm(q, q, out_dtype=torch.bfloat16), out_dtype=torch.bfloat16)


# Edges of the scale.


def edges(element: Format) -> torch.Tensor:
    """max·2^k and an ulp to either side at every exponent; every exponent with a few mantissas; subnormal numbers."""
    powers = torch.tensor([element.max], dtype=torch.float64) * 2.0 ** torch.arange(-160, 121)
    powers = powers[(powers > 2.0**-149) & (powers < 2.0**128)].float()
    around = [powers, powers.nextafter(torch.tensor(math.inf)), powers.nextafter(torch.tensor(0.0))]
    mantissas = torch.tensor([0, 1, 0x2AAAAB, 0x400000, 0x600000, 0x7FFFFF])
    every = ((torch.arange(255) << 23).unsqueeze(1) + mantissas).flatten().int().view(torch.float32)
    found = torch.cat([*around, every, torch.tensor([0.0, 1e-45, 3e-45, 1e-40, math.inf])])
    return found[found.isinf() | (found < math.inf)].unique()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["fp32", "pow2", "fp32-eps1e-06", "pow2-eps1e-06"])
@pytest.mark.parametrize("dtype", DTYPES)
@ELEMENTS
def test_the_encode_scale_is_exact_on_every_edge(element: Format, dtype: str, kind: str) -> None:
    recipe = find_recipe(f"fp8-block-1x128-{element.name.lower()}-{kind}")
    amax = torch.cat([edges(element), torch.tensor([math.nan])])
    found = encode_scales(amax.view(-1, 1), recipe, DTYPES[dtype])
    twin = [fp8.encode_scale(a, recipe, dtype) for a in amax.tolist()]
    assert torch.equal(bits(found.flatten()), bits(torch.tensor(twin)))
    assert found.isfinite().all()
    if "pow2" in kind:
        assert (found.view(torch.int32) & 0x7FFFFF == 0).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["", "-pow2", "-eps1e-06", "-pow2-eps1e-06"])
@ELEMENTS
def test_the_scale_of_a_tensor_is_exact_on_every_edge(element: Format, kind: str) -> None:
    """FLT_MAX if the quotient is infinite, for any dtype of x; the stored scale is the inverse."""
    recipe = find_recipe(f"fp8-current-{element.name.lower()}{kind}")
    amax = torch.cat([edges(element), torch.tensor([math.nan])])
    found = tensor_scale(amax, recipe, torch.float16)
    expected = [fp8.encode_scale(a, recipe, "float32") for a in amax.tolist()]
    assert torch.equal(bits(found), bits(torch.tensor(expected)))
    for a, scale in list(zip(amax, expected, strict=True))[::37]:
        q = quantize(torch.ones(1, 4), recipe, amax=a.view(1))
        assert bits(q.scales).item() == bits(torch.tensor(fp8.inverse(scale))).item()
        assert torch.equal(bits(q.tensor_scale), bits(torch.tensor([scale])))  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "scale"), [
    ("float32", torch.finfo(torch.float32).max), ("bfloat16", torch.finfo(torch.bfloat16).max),
    ("float16", 448 * 2.0**24),  # its smallest number has a finite quotient, which is not cut to 65504
])  # fmt: skip
def test_an_infinite_quotient_becomes_the_largest_input(dtype: str, scale: float) -> None:
    tiny = 2.0**-24 if dtype == "float16" else 2.0**-133
    x = torch.full((1, 128), tiny, dtype=DTYPES[dtype])
    assert quantize(x, "fp8-block-1x128-e4m3-fp32").scales.item() == fp8.inverse(scale)
    assert quantize(x, "fp8-current-e4m3").tensor_scale.item() == (  # type: ignore[union-attr]
        scale if dtype == "float16" else torch.finfo(torch.float32).max
    )


def stored_pow2(x: torch.Tensor, name: str) -> float:
    return quantize(x, name).scales.flatten()[0].item()


@ELEMENTS
def test_a_power_of_two_is_never_above_the_quotient(element: Format) -> None:
    """Stored inverses are 2^k at amax max·2^k, and twice that an ulp above; an ulp below the quotient is rounded."""
    name = f"fp8-block-1x128-{element.name.lower()}-pow2"
    at = torch.tensor(element.max * 2.0**-3)
    for amax, power in ((at, -3), (at.nextafter(torch.tensor(math.inf)), -2), (at / 1.0001, -3)):
        assert stored_pow2(torch.full((1, 128), amax.item()), name) == 2.0**power


@pytest.mark.parametrize("name", [*BLOCKS, *CURRENT])
def test_special_values(name: str) -> None:
    recipe = find_recipe(name)
    top = recipe.element.max_code
    zeros = quantize(torch.tensor([[0.0, -0.0]]), recipe)
    assert zeros.scales.tolist() == [[1.0]]
    assert zeros.codes.tolist() == [[0, 128]]
    infinite = quantize(torch.tensor([[math.inf, -math.inf, 1.0, -1e30]]), recipe)
    assert infinite.scales.tolist() == [[1.0]]
    one = rounding.encode(1.0, recipe.element)
    assert infinite.codes.tolist() == [[top, top | 128, one, top | 128]]
    nan = quantize(torch.tensor([[math.nan, -math.nan, recipe.element.max, -recipe.element.max]]), recipe)
    assert nan.scales.tolist() == [[1.0]]
    assert nan.codes.tolist() == [[127, 127, top, top | 128]]
    only = quantize(torch.full((1, 3), math.nan), recipe)
    assert only.scales.tolist() == [[1.0]]
    assert only.codes.tolist() == [[127] * 3]


@pytest.mark.parametrize("name", [*BLOCKS, *CURRENT])
def test_a_nan_that_propagates_makes_the_scale_1(name: str) -> None:
    """docs/numerics.md#fp8-with-float32-scales: scale = 1 if amax is NaN; 300 does not saturate, and would be
    scaled otherwise."""
    recipe = dataclasses.replace(find_recipe(name), nan="propagate")
    q = quantize(torch.tensor([[math.nan, 300.0]]), recipe)
    assert q.scales.tolist() == [[1.0]]
    assert q.codes.tolist() == [[127, rounding.encode(300.0, recipe.element)]]


def test_eps_is_the_smallest_amax() -> None:
    x = torch.full((1, 128), 2.0**-30)
    for name in ("fp8-block-1x128-e4m3-fp32", "fp8-current-e4m3"):
        plain, raised = quantize(x, name), quantize(x, f"{name}-eps1e-06")
        assert plain.codes.tolist() == [[0x7E] * 128]
        expected = fp8.inverse(fp8.quotient(448.0, float(np.float32(1e-6))))
        assert raised.scales.tolist() == [[expected]]
        assert raised.codes[0, 0] == rounding.encode(fp8.product(2.0**-30, 1 / expected), E4M3)
    assert raised.amax is not None
    assert raised.amax.tolist() == [2.0**-30]  # what was observed


# One scale for the tensor.


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scale", [1.0, 3.7, 2.0**-130, 1e-45, 3.4028234663852886e38, 448.0, 0.1])
@pytest.mark.parametrize("family", MATRICES)
@ELEMENTS
def test_delayed_scaling_uses_the_scale_that_it_is_given(element: Format, family: str, scale: float) -> None:
    x = matrix(family, 2, 3, 50)
    given_scale = torch.tensor([scale])
    q = quantize(x, f"fp8-delayed-{element.name.lower()}", scale=given_scale)
    held = given_scale.item()
    expected = [[fp8.encode(value, held, element) for value in row] for row in x.tolist()]
    assert q.codes.tolist() == expected
    assert bits(q.scales).item() == bits(torch.tensor(fp8.inverse(held))).item()
    assert tuple(q.scales.shape) == (1, 1)
    assert torch.equal(q.tensor_scale, given_scale)  # type: ignore[arg-type]
    assert q.amax is not None
    assert q.amax.item() == rounding.largest(x.numpy().ravel())  # of what was seen, for the history


# Back to values.


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_dequantize_is_one_product_and_one_cast(name: str, dtype: str) -> None:
    x = matrix("spread", 4, 130, 200)
    q = quantize(x, name, scale=scale_of(name))
    recipe = q.recipe
    high, wide = x.shape[0] if recipe.whole else recipe.block[0], x.shape[1] if recipe.spans_k else recipe.block[1]
    factors = q.scales.repeat_interleave(high, 0)[:130].repeat_interleave(wide, 1)[:, :200].double()
    values = torch.tensor(recipe.element.values, dtype=torch.float64)[q.codes.int()]
    expected = (values * factors).float().to(DTYPES[dtype])
    assert torch.equal(bits(dequantize(q, DTYPES[dtype])), bits(expected))


# Halves.


@pytest.mark.parametrize("shape", [(130, 200), (1, 1), (3, 129), (0, 0), (0, 128), (128, 0)])
@pytest.mark.parametrize("name", ALL)
def test_each_half_is_quantize_with_transposed_codes(name: str, shape: tuple[int, int]) -> None:
    x = matrix("spread", 5, *shape).bfloat16()
    row, column = quantize_both(x, name, scale=scale_of(name))
    for half, alone in ((row, x), (column, x.T.contiguous())):
        assert half is not None
        expected = quantize(alone, name, scale=scale_of(name))
        assert (half.shape, half.transposed, half.swizzled) == (tuple(alone.shape), False, False)
        assert tuple(half.codes.shape) == codes_shape(half.shape, half.recipe) == tuple(alone.shape)
        assert tuple(half.scales.shape) == scales_shape(half.shape, half.recipe)
        assert torch.equal(half.codes, expected.codes)
        assert torch.equal(bits(half.scales), bits(expected.scales))
        assert (half.amax is None) == (expected.amax is None) == name.startswith(WITHOUT_AMAX)
        if half.amax is not None:
            assert torch.equal(bits(half.amax), bits(expected.amax))  # type: ignore[arg-type]
        assert half.codes.is_contiguous()
    if "1x128" not in name and name not in ROWS:
        assert torch.equal(row.codes.T, column.codes)  # type: ignore[union-attr]
        assert torch.equal(row.scales.T, column.scales)  # type: ignore[union-attr]
    for wanted in ({"rowwise": False}, {"columnwise": False}):
        some = quantize_both(x, name, scale=scale_of(name), **wanted)
        assert [half is None for half in some] == [not wanted.get(side, True) for side in ("rowwise", "columnwise")]


# Sections.


SIZES = {"plain": [16, 128, 32], "no multiples": [1, 130, 5, 70], "empty": [0, 7, 0, 40, 0], "none": [0, 0]}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_each_section_is_what_quantize_gives_for_it(name: str, columnwise: bool, sizes: list[int]) -> None:
    """Each number begins a block, or is a tensor with a separate scale."""
    x = matrix("spread", 6, sum(sizes), 45)
    scale = torch.arange(1.0, len(sizes) + 1) * 0.7 if name.startswith("fp8-delayed") else None
    grouped = quantize_grouped(x, torch.tensor(sizes), name, columnwise=columnwise, scale=scale)
    for every in (grouped.amax, grouped.tensor_scale):
        assert (every is None) == name.startswith(WITHOUT_AMAX)
        assert every is None or tuple(every.shape) == (len(sizes),)
    for number, (part, section) in enumerate(zip(grouped.sections(), torch.split(x, sizes), strict=True)):
        alone = section.T.contiguous() if columnwise else section
        expected = quantize(alone, name, scale=None if scale is None else scale[number : number + 1])
        assert (part.shape, part.transposed) == (expected.shape, False)
        assert torch.equal(part.codes, expected.codes)
        assert torch.equal(bits(part.scales), bits(expected.scales))
        assert torch.equal(bits(dequantize(part)), bits(dequantize(expected)))
        for mine, theirs in ((part.amax, expected.amax), (part.tensor_scale, expected.tensor_scale)):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(bits(mine), bits(theirs))  # type: ignore[arg-type]


def test_the_largest_scale_of_the_input_must_be_told_its_dtype() -> None:
    recipe = find_recipe("fp8-block-1x128-e4m3-fp32")
    with pytest.raises(ValueError, match=f"recipe {recipe} has a largest scale of the dtype of x; give dtype"):
        encode_scales(torch.ones(1, 1), recipe, None)


# Errors.
