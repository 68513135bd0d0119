"""Norms, activations and rotary embedding fused with quantize, on inputs whose results are exact.

Then scales and codes are those of `reference.quantize` to the bit. Other inputs are judged by the shipped contracts, in
the quick tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product as product_of
from typing import Any

import pytest
import torch

from narrowgauge.native import ops as native_ops
from narrowgauge.native.fused import norm, prepared, rows
from narrowgauge.native.fused.rows import LONGEST_ROW
from narrowgauge.reference import ops as reference
from tests.native.devices import ON_EVERY_DEVICE, ops
from tests.native.samples import assert_same

RECIPES = (
    "mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4", "nvfp4", "fp8-row-e4m3", "fp8-block-1x128-e4m3",
    "fp8-block-1x128-e5m2-fp32", "fp8-block-1x16-e4m3", "fp8-block-1x512-e4m3-fp32", "fp8-current-e4m3", "fp8-static",
)  # fmt: skip
SHAPES = ((3, 64), (5, 200), (1, 1024), (4, 18), (0, 64), (2, 0), (2, 4096))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)

Product = tuple[str, tuple[torch.Tensor, ...], dict[str, Any], torch.Tensor]


def signs(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """+1 and −1 in turn: an even number of elements has the mean 0."""
    return (1 - 2 * (torch.arange(shape[1]) % 2)).expand(shape).to(dtype)


def silu(y: torch.Tensor) -> Product:
    """SiLU of 32 is 32 in float32, and the product with a power of two is exact."""
    return "silu_mul_quantize", (torch.cat([torch.full_like(y, 32.0), y / 32], dim=1),), {}, y


def rmsnorm(y: torch.Tensor) -> Product:
    """Rows of ±1 have the norm 1, so the result is ± the weight."""
    x, weight = signs((len(y), y.shape[1]), y.dtype), y[0] if len(y) else torch.ones_like(y[:0].sum(0))
    return "rmsnorm_quantize", (x, weight), {"eps": 0.0}, x * weight


def layernorm(y: torch.Tensor) -> Product:
    """Rows of ±1 have the mean 0 and the variance 1; the bias moves a column to a multiple of its weight."""
    x, weight = signs((len(y), y.shape[1]), y.dtype), y[0] if len(y) else torch.ones_like(y[:0].sum(0))
    return "layernorm_quantize", (x, weight, weight), {"eps": 0.0}, x * weight + weight


def rope(y: torch.Tensor) -> Product:
    """A turn by a right angle."""
    first, second = y.chunk(2, dim=1)
    cos = torch.zeros_like(first)
    return "rope_quantize", (y, cos, torch.ones_like(cos)), {}, torch.cat([-second, first], dim=1)


def rope_partial(y: torch.Tensor) -> Product:
    """A turn of half of the columns by a right angle; columns that 4 divides."""
    y = y[:, : y.shape[1] // 4 * 4]
    (first, second), rest = y[:, : y.shape[1] // 2].chunk(2, dim=1), y[:, y.shape[1] // 2 :]
    cos = torch.zeros_like(first)
    return "rope_partial_quantize", (y, cos, torch.ones_like(cos)), {}, torch.cat([-second, first, rest], dim=1)


PRODUCTS: tuple[Callable[[torch.Tensor], Product], ...] = (silu, rmsnorm, layernorm, rope, rope_partial)
EVERY_PRODUCT = pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.__name__)


def matrices() -> Iterator[torch.Tensor]:
    """Odd integers times powers of two by column: products with ±1 and 1/32 are exact, and no sum is a zero."""
    for number, shape in enumerate(SHAPES):
        generator = torch.Generator().manual_seed(number)
        integers = 2 * torch.randint(-31, 31, shape, generator=generator) + 1
        powers = torch.exp2(torch.randint(-3, 4, (shape[1],), generator=generator))
        yield (integers * powers).to(DTYPES[number % 3])


def scale_of(recipe: str) -> torch.Tensor | None:
    return torch.full((1,), 13.0) if recipe == "fp8-static" else None


@pytest.mark.sampled(66)
@ON_EVERY_DEVICE
@EVERY_RECIPE
@EVERY_PRODUCT
def test_exact_products_have_the_bytes_of_the_reference(product: Any, recipe: str) -> None:
    scale = scale_of(recipe)
    for matrix in matrices():
        name, arguments, options, y = product(matrix)
        found = getattr(ops, name)(*arguments, recipe, scale, **options)
        assert_same(found, reference.quantize(y, recipe, scale=scale))


@pytest.mark.sampled(4)
@ON_EVERY_DEVICE
@pytest.mark.parametrize("dialect", ["", "@vllm-static"])
def test_given_scales_of_elements_and_of_codes(dialect: str) -> None:
    recipe, scale = f"fp8-static-e4m3{dialect}", torch.tensor([0.37])
    for matrix in matrices():
        _, arguments, options, y = rmsnorm(matrix)
        codes = ops.rmsnorm_quantize_static(*arguments, scale, recipe, **options)
        assert torch.equal(codes, reference.quantize(y, recipe, scale=scale).codes)
    x = torch.full((1, 32), torch.nan)
    code = 0x7E if dialect else 0x7F
    assert (ops.rmsnorm_quantize_static(x, x[0], scale, recipe) == code).all()


def test_other_dialects_of_given_scales_are_refused() -> None:
    x, one = torch.zeros(2, 64), torch.ones(1)
    with pytest.raises(NotImplementedError, match=r"te and vllm-static, not vllm-static-before-0\.33"):
        ops.rmsnorm_quantize_static(x, x[0], one, "fp8-static-e4m3@vllm-static-before-0.33")
    with pytest.raises(ValueError, match="makes its scales; call the method without _static"):
        ops.silu_mul_quantize_static(x, one, "fp8-row-e4m3")


@ON_EVERY_DEVICE
@pytest.mark.parametrize("recipe", ["mxfp8-e4m3", "nvfp4"])
def test_scales_in_the_layout_of_tiles(recipe: str) -> None:
    for matrix in matrices():
        name, arguments, _, y = silu(matrix)
        found = getattr(ops, name)(*arguments, recipe, scales="128x4")
        assert_same(found, reference.quantize(y, recipe, scales="128x4"))


@pytest.mark.sampled(2)
@ON_EVERY_DEVICE
@EVERY_PRODUCT
def test_views_of_the_operands(product: Any) -> None:
    for matrix in matrices():
        name, arguments, options, y = product(matrix)
        views = [torch.stack([a, a], dim=-1)[..., 0] for a in arguments]
        assert_same(getattr(ops, name)(*views, "mxfp8-e4m3", **options), reference.quantize(y, "mxfp8-e4m3"))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-current-e4m3"])
def test_a_given_amax_replaces_the_own(recipe: str) -> None:
    name, arguments, _, y = silu(next(matrices()))
    amax = torch.tensor([1e4])
    found = getattr(ops, name)(*arguments, recipe, amax=amax)
    assert_same(found, reference.quantize(y, recipe, amax=amax))
    assert not torch.equal(found.codes, reference.quantize(y, recipe).codes)


@ON_EVERY_DEVICE
def test_the_residual_is_the_rounded_sum() -> None:
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    residual, weight = x.flip(0) * 1.0078125, torch.ones(200)
    found = ops.add_rmsnorm_quantize(x, residual, weight, "mxfp8-e4m3")
    total = (x.float() + residual.float()).bfloat16()
    assert torch.equal(found["residual"], total)
    assert_same(found["quantized"], ops.rmsnorm_quantize(total, weight, "mxfp8-e4m3"))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("recipe", ["mxfp8-e4m3", "nvfp4", "fp8-current-e4m3"])
def test_a_further_call_of_a_form_reads_its_own_tensors(recipe: str) -> None:
    x, other, weight = (torch.randn(3, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3))
    results = [
        ops.add_rmsnorm_quantize(a, b, w, recipe)
        for a, b, w in ((x, x, weight[0]), (x, other, weight[0]), (other, x, weight[1]))
        for _ in range(2)
    ]
    for first, second in zip(results[::2], results[1::2], strict=True):
        assert_same(first["quantized"], second["quantized"])
    for found, total, w in zip(results[1::2], (x + x, x + other, x + other), weight[[0, 0, 1]], strict=True):
        assert torch.equal(found["residual"], total)
        assert_same(found["quantized"], ops.rmsnorm_quantize(total, w, recipe))
    given = [ops.silu_mul_quantize(x, "nvfp4", amax=torch.tensor([amax])) for amax in (5.0, 5.0, 9.0)]
    assert given[1].amax is not None
    assert torch.equal(given[1].codes, given[0].codes)
    assert [q.tensor_scale.item() for q in given] == [
        reference.quantize(x, "nvfp4", amax=torch.tensor([a])).tensor_scale.item() for a in (5.0, 5.0, 9.0)
    ]


@pytest.mark.parametrize("option", [{"eps": 1.0}, {"zero_centered": True}])
def test_options_of_norms_change_the_result(option: dict[str, Any]) -> None:
    x = torch.linspace(-2, 3, 64).expand(2, 64).bfloat16()
    plain, changed = (ops.rmsnorm_quantize(x, torch.full((64,), 0.3), "fp8-row-e4m3", **o) for o in ({}, option))
    assert not torch.equal(plain.scales, changed.scales)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("recipe", ["fp8-row-e4m3", "mxfp8-e4m3"])
def test_an_upper_bound_of_the_amaxes(recipe: str) -> None:
    for matrix in matrices():
        name, arguments, options, y = rmsnorm(matrix)
        found = getattr(ops, name)(*arguments, recipe, ub=2.0, **options)
        bounded = reference.quantize(y.clamp(-2, 2), recipe)
        assert torch.equal(found.scales, bounded.scales)
        assert recipe != "fp8-row-e4m3" or torch.equal(found.codes, bounded.codes)
    with pytest.raises(NotImplementedError, match="nvfp4 has a scale of the tensor"):
        ops.rmsnorm_quantize(torch.ones(2, 64), torch.ones(64), "nvfp4", ub=2.0)


@ON_EVERY_DEVICE
def test_an_upper_bound_of_the_scales() -> None:
    x = torch.linspace(-3, 3, 6 * 256).view(6, 256).bfloat16()
    plain, found = (ops.silu_mul_quantize(x, "fp8-row-e4m3", **o) for o in ({}, {"scale_ub": 2.0**-9}))
    assert plain.scales.max() > 2.0**-9
    assert torch.equal(found.scales, plain.scales.clamp(max=2.0**-9))
    assert not torch.equal(found.codes, plain.codes)
    with pytest.raises(NotImplementedError, match="nvfp4 has a scale of the tensor"):
        ops.silu_mul_quantize(x, "nvfp4", scale_ub=2.0)


@pytest.mark.parametrize("name", ["weight", "bias", "residual", "cos", "sin"])
def test_a_wrong_dtype_of_a_vector_is_named_with_the_remedy(name: str) -> None:
    vector, double = torch.ones(64), torch.ones(64, dtype=torch.float64)
    x, angles = torch.ones(2, 64), torch.ones(2, 32)
    calls = {
        "weight": lambda: ops.rmsnorm_quantize(x, double, "mxfp4"),
        "bias": lambda: ops.layernorm_quantize(x, vector, vector.bfloat16(), "mxfp4"),
        "residual": lambda: ops.add_rmsnorm_quantize(x, x.bfloat16(), vector, "mxfp4"),
        "cos": lambda: ops.rope_quantize(x, angles.double(), angles.double(), "mxfp4"),
        "sin": lambda: ops.rope_quantize(x, angles, angles.bfloat16(), "mxfp4"),
    }
    with pytest.raises(NotImplementedError, match=rf"{name} is torch\.\w+; .*: pass {name}\.to\(torch\.float32\)"):
        calls[name]()


def test_erf_is_not_tanh() -> None:
    x = torch.linspace(-4, 4, 512).repeat(1, 2)
    by_tanh, by_erf = (ops.gelu_mul_quantize(x, "fp8-row-e4m3", approximate=form) for form in ("tanh", "erf"))
    assert not torch.equal(by_tanh.codes, by_erf.codes)


@pytest.mark.parametrize("recipe", ["mxfp8-2d", "nvfp4-rht", "nvfp4-sr", "nvfp4-rowscaled", "nvfp4-4over6-448-mae",
                                    "fp8-block-128x128"])  # fmt: skip
def test_recipes_that_rows_do_not_have(recipe: str) -> None:
    with pytest.raises(NotImplementedError, match="the native kernels do not have recipe"):
        ops.gelu_mul_quantize(torch.zeros(2, 64), recipe)


def test_errors_name_the_shape_and_the_limit() -> None:
    x, weight = torch.zeros(2, 63), torch.zeros(64)
    with pytest.raises(ValueError, match=r"\(2, 63\) has an odd number of columns; gate and up"):
        ops.silu_mul_quantize(x, "mxfp8-e4m3")
    with pytest.raises(ValueError, match=r"\(2, 63\) has an odd number of columns; its halves"):
        ops.rope_quantize(x, x, x, "mxfp8-e4m3")
    with pytest.raises(ValueError, match="weight"):
        ops.rmsnorm_quantize(x, weight, "mxfp8-e4m3")
    with pytest.raises(NotImplementedError, match=rf"up to {LONGEST_ROW} columns"):
        ops.rmsnorm_quantize(torch.zeros(1, LONGEST_ROW + 16), torch.zeros(LONGEST_ROW + 16), "mxfp8-e4m3")
    with pytest.raises(NotImplementedError, match="layout linear or 128x4, not 8x4"):
        ops.silu_mul_quantize(torch.zeros(2, 64), "mxfp8-e4m3", scales="8x4")


@pytest.mark.long
@pytest.mark.parametrize("kept", [(), ("-DKEPT=1", "-DBLOCK_THREADS=32")], ids=["loaded", "kept"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_that_load_the_next_row_early(
    dtype: torch.dtype, kept: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form of a GPU, on a CPU: two thread blocks for all rows give the bytes of a block for each row."""
    pipeline = (*kept, "-DPIPELINED=1")
    draw = torch.Generator().manual_seed(0)
    for (m, k), recipe in product_of(((7, 256), (5, 200), (9, 18), (0, 64)), ("fp8-row-e4m3", "mxfp4", "nvfp4")):
        x, weight = (torch.randint(-4, 5, shape, generator=draw).to(dtype) for shape in ((m, k), (k,)))
        x[1:2] = torch.nan
        for name, vectors in (("rmsnorm_quantize", 1), ("layernorm_quantize", 2)):
            arguments = (x, *[weight] * vectors, recipe)
            before = getattr(native_ops, name)(*arguments)
            with monkeypatch.context() as patch:
                patch.setattr(prepared, "PREPARED", {})
                patch.setattr(norm, "PREPARED", prepared.PREPARED)
                patch.setattr(rows, "grid_of", lambda *sizes, **options: rows.Grid(2, 32))
                patch.setattr(norm, "variant_flags", lambda *variant: pipeline)
                found = getattr(native_ops, name)(*arguments)
            assert_same(found, before)
