"""GEMM: golden outputs, the exact sum against fractions, α, the epilogue, empty shapes, NaN, errors."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.gemm.gemm import alpha
from narrowgauge.reference.gemm.operands import operand
from narrowgauge.reference.numbers import exact as module
from narrowgauge.reference.numbers.exact import exact_sum, lowest_bit, round_to_odd, two_sum
from narrowgauge.reference.ops import dequantize, gemm, quantize, quantize_both
from narrowgauge.reference.scalar import gemm as scalar_gemm
from narrowgauge.reference.scalar import hadamard
from narrowgauge.reference.scalar import rounding as scalar_rounding
from narrowgauge.spec.formats import E2M3
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Hadamard, find_recipe
from tests.golden import bits, floats, golden, load
from tests.reference import samples
from tests.reference.samples import FAMILIES, operands, quantized, values

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SETTINGS = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def random_pair(family: str, seed: int, m: int, n: int, k: int, amax: float = 2688.0) -> tuple[Quantized, Quantized]:
    left, left_scales, right, right_scales = operands(family, np.random.default_rng(seed), m, n, k)
    return quantized(left, left_scales, amax), quantized(right, right_scales, amax)


def units(x: torch.Tensor) -> np.ndarray:
    """Operand values as Python integers, in units of 2^-10."""
    counts = x.numpy() * 1024
    assert (counts == np.round(counts)).all()
    return np.vectorize(int, otypes=[object])(counts)


def fraction_sums(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """Σ a·b as exact fractions (object array)."""
    return np.vectorize(lambda total: Fraction(int(total), 1 << 20), otypes=[object])(units(a) @ units(b).T)


def certified(a: torch.Tensor, b: torch.Tensor) -> bool:
    return module.certified(module.span(a), module.span(b))


def assert_exact(a: torch.Tensor, b: torch.Tensor) -> None:
    total, expected = exact_sum(a, b), fraction_sums(a, b)
    low = torch.zeros_like(total.high) if total.low is None else total.low
    got = [Fraction(h) + Fraction(x) for h, x in zip(total.high.ravel().tolist(), low.ravel().tolist(), strict=True)]
    assert got == expected.ravel().tolist()
    rounded = [scalar_rounding.nearest(value, "float32") for value in expected.ravel()]
    assert total.to_float32().ravel().tolist() == rounded


# Golden outputs of Transformer Engine.


def golden_operands(arrays: dict[str, np.ndarray]) -> tuple[Quantized, Quantized]:
    pair = []
    for side in ("x", "w"):
        codes, scales, amax = (torch.from_numpy(arrays[f"{side}.{part}"]) for part in ("codes", "scales", "amax"))
        pair.append(Quantized(codes, scales, amax, find_recipe("nvfp4"), tuple(arrays[side].shape)))
    return pair[0], pair[1]


@pytest.mark.parametrize("path", golden("gemm_*.npz"))
def test_quantize_gives_the_golden_operands(path: Path) -> None:
    arrays = load(path)
    for side, expected in zip(("x", "w"), golden_operands(arrays), strict=True):
        q = quantize(floats(arrays[side], torch.bfloat16), "nvfp4")
        assert torch.equal(q.codes, expected.codes)
        assert torch.equal(q.scales, expected.scales)
        assert torch.equal(q.amax, expected.amax)


@pytest.mark.parametrize("path", golden("gemm_*.npz"))
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_golden_outputs_are_exact_or_within_the_bounds(path: Path, accumulate: bool, out_dtype: torch.dtype) -> None:
    """Transformer Engine rounds c to the output's dtype first, and adds c unfused. Exact sums have equal bits."""
    arrays = load(path)
    a, b = golden_operands(arrays)
    short = "fp32" if out_dtype == torch.float32 else "bf16"
    theirs = floats(arrays[f"y.{short}{'.accumulate' * accumulate}"], out_dtype)
    c = torch.from_numpy(arrays["c"]).to(out_dtype) if accumulate else None
    ours = gemm(a, b, out_dtype=out_dtype, c=c)
    limits = bounds(a, b, out_dtype=out_dtype, c=c)
    assert limits.exact.any()
    assert torch.equal(bits(ours)[limits.exact], bits(theirs)[limits.exact])
    assert ((limits.lower <= theirs) & (theirs <= limits.upper)).all()
    assert ((theirs.double() - limits.centre).abs() <= limits.budget).all()


# The operand.


def test_an_operand_is_every_code_times_every_scale() -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 1))
    scales = np.arange(256, dtype=np.uint8).reshape(256, 1)
    got = operand(quantized(codes, scales))
    assert got.dtype == torch.float64
    np.testing.assert_array_equal(got, values(codes, scales))


# The exact sum.


@SETTINGS
@given(st.sampled_from(FAMILIES), st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5))
def test_the_sum_is_exact(family: str, seed: int, m: int, n: int, blocks: int) -> None:
    a, b = random_pair(family, seed, m, n, 16 * blocks)
    assert_exact(operand(a), operand(b))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("columns", [1024, 1040, 2048, 5200])
def test_the_sum_is_exact_for_long_rows(family: str, columns: int) -> None:
    a, b = random_pair(family, columns, 2, 3, columns)
    assert_exact(operand(a), operand(b))


def dyadic_rows(numbers: list[tuple[float, float]], repeat: tuple[float, float], k: int) -> tuple[torch.Tensor, ...]:
    """Rows of K values: pairs (a, b) first, then `repeat` over and over."""
    pairs = numbers + [repeat] * (k - len(numbers))
    a, b = zip(*pairs, strict=True)
    return torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64)


LARGEST, SMALLEST = 2688.0, 2.0**-10
# Σ = n·2688² + an odd or even multiple of 2^11 + 2^10 (half an ulp of float32 above 2^34) ± 2^-20.
WITNESSES = {
    "even tie and a little more": [(32.0, 32.0), (SMALLEST, SMALLEST)],
    "even tie and a little less": [(32.0, 32.0), (SMALLEST, -SMALLEST)],
    "odd tie and a little more": [(64.0, 32.0), (32.0, 32.0), (SMALLEST, SMALLEST)],
    "odd tie and a little less": [(64.0, 32.0), (32.0, 32.0), (SMALLEST, -SMALLEST)],
    "even tie": [(32.0, 32.0), (SMALLEST, SMALLEST), (SMALLEST, -SMALLEST)],
    "odd tie": [(64.0, 32.0), (32.0, 32.0), (SMALLEST, SMALLEST), (SMALLEST, -SMALLEST)],
}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("witness", WITNESSES)
def test_a_sum_wider_than_float64_rounds_once(witness: str, sign: int) -> None:
    a, b = dyadic_rows(WITNESSES[witness], (LARGEST, LARGEST), 3200)
    b = b * sign
    assert not certified(a, b)
    total = fraction_sums(a, b)[0, 0]
    assert 2**34 < abs(total) < 2**35
    if "little" in witness:
        assert Fraction(float(total)) != total, "the witness has to need more than 53 bits"
        assert Fraction(float(a @ b.T)) != total
    assert_exact(a, b)


def test_a_row_of_more_than_a_million_columns_is_exact() -> None:
    k = (1 << 20) + 16
    a, b = torch.full((1, k), LARGEST, dtype=torch.float64), torch.full((2, k), LARGEST, dtype=torch.float64)
    b[1] = -LARGEST
    a[0, 0] = b[0, 0] = b[1, 0] = SMALLEST
    assert not certified(a, b)
    total = exact_sum(a, b)
    assert total.low is not None
    for j, sign in ((0, 1), (1, -1)):
        got = Fraction(total.high[0, j].item()) + Fraction(total.low[0, j].item())
        assert got == sign * (k - 1) * Fraction(LARGEST) ** 2 + Fraction(SMALLEST) ** 2


@pytest.mark.parametrize(("m", "n"), [(2, 3), (0, 3), (2, 0)])
@pytest.mark.parametrize("k", [16, 2048])
def test_a_certificate_is_never_wrong(m: int, n: int, k: int) -> None:
    """If the float64 product is called exact, no partial sum of magnitudes exceeds 2^53 units."""
    for family in FAMILIES:
        a, b = (operand(q) for q in random_pair(family, m + n + k, m, n, k))
        if m and n and certified(a, b):
            nonzero = [units(x)[units(x) != 0] for x in (a, b)]
            step = [min(int(v) & -int(v) for v in some) for some in nonzero]
            assert (units(a.abs()) @ units(b.abs()).T).max() <= 2**53 * step[0] * step[1]
        assert tuple(exact_sum(a, b).high.shape) == (m, n)


# Its parts.


DOUBLES = st.one_of(
    st.floats(-1e30, 1e30),
    # Midpoints of float32 neighbours, and small numbers to break them.
    st.builds(lambda n, e: math.ldexp(2 * n + 1, e), st.integers(-(2**24), 2**24), st.integers(-40, 40)),
    st.builds(math.ldexp, st.sampled_from([1.0, -1.0, 3.0, -3.0]), st.integers(-160, 60)),
)


@SETTINGS
@given(DOUBLES, DOUBLES)
def test_two_sum_loses_nothing(a: float, b: float) -> None:
    s, e = (x.item() for x in two_sum(*(torch.tensor([x], dtype=torch.float64) for x in (a, b))))
    assert s == a + b
    assert Fraction(s) + Fraction(e) == Fraction(a) + Fraction(b)


@SETTINGS
@given(DOUBLES, DOUBLES)
def test_rounding_to_odd_first_is_rounding_once(a: float, b: float) -> None:
    s, e = two_sum(*(torch.tensor([x], dtype=torch.float64) for x in (a, b)))
    once = scalar_rounding.nearest(Fraction(a) + Fraction(b), "float32")
    assert round_to_odd(s, e).float().item() == once


def test_rounding_to_odd_around_every_kind_of_tie() -> None:
    """float64 numbers up to 3 ulp from a tie of float32, or from a float32, plus up to half an ulp."""
    ulp = 2.0**-52
    for start in (1.0, 1 + 2.0**-24, 1 + 2.0**-23, 1 + 3 * 2.0**-24, 2 - 2.0**-24):
        for steps in range(-3, 4):
            for rest in (-0.5, -0.25, -(2.0**-900), 0.0, 2.0**-900, 0.25, 0.5):
                for sign in (1, -1):
                    high, low = sign * (start + steps * ulp), sign * rest * ulp
                    if high + low != high:  # half an ulp beside an odd number changes `high`
                        continue
                    one, other = (torch.tensor([x], dtype=torch.float64) for x in (high, low))
                    once = scalar_rounding.nearest(Fraction(high) + Fraction(low), "float32")
                    assert round_to_odd(one, other).float().item() == once


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lowest_bit_divides_a_row(family: str) -> None:
    left, left_scales, _, _ = operands(family, np.random.default_rng(5), 60, 1, 16)
    rows = operand(quantized(left, left_scales))
    for row, found in zip(rows, lowest_bit(rows).tolist(), strict=True):
        counts = [int(v * 1024) for v in row.tolist() if v != 0]
        assert found == min((n & -n for n in counts), default=math.inf) / 1024


# α and the epilogue.

AMAXES = [0.0, 1e-45, 1e-30, 3.7, 65.0, 2688.0, 1e19, 1e30, 3.4028234663852886e38, math.inf, math.nan]


@pytest.mark.parametrize("expression", ["(a*b)/d", "(b*a)*(1/d)"])
def test_alpha_is_its_expression_in_float32(expression: str) -> None:
    one = quantize(torch.ones(1, 16), "nvfp4" if expression == "(a*b)/d" else "nvfp4@te-native")
    assert one.recipe.alpha == expression
    rng = np.random.default_rng(6)
    pairs = [(x, y) for x in AMAXES for y in AMAXES] + rng.uniform(0.1, 300, (500, 2)).tolist()
    for x, y in pairs:
        a, b = (Quantized(one.codes, one.scales, torch.tensor([v]), one.recipe, one.shape) for v in (x, y))
        expected = torch.tensor([[scalar_gemm.alpha(np.float32(x), np.float32(y), expression)]])
        assert torch.equal(alpha(a, b), expected) or (alpha(a, b).isnan().all() and expected.isnan().all())


KINDS = {"nvfp4": 448, "nvfp4-rowscaled": 448, "nvfp4-4over6-256-mae": 256, "nvfp4-rowscaled-4over6-256-mse": 256}


def of_kind(kind: str, expression: str, seed: int, rows: int) -> Quantized:
    """A random operand (rows, 48) of a recipe with α's expression, its rows of different sizes."""
    recipe = dataclasses.replace(find_recipe(kind), alpha=expression)  # type: ignore[arg-type]
    x = samples.matrix("normal", seed, rows, 48) * torch.linspace(0.3, 40, rows).unsqueeze(1)
    return quantize(x, recipe)


@pytest.mark.parametrize("expression", ["(a*b)/d", "(b*a)*(1/d)"])
@pytest.mark.parametrize("left", KINDS)
@pytest.mark.parametrize("right", KINDS)
def test_alpha_has_the_amaxes_and_constants_of_both_recipes(left: str, right: str, expression: str) -> None:
    a, b = of_kind(left, expression, 1, 3), of_kind(right, expression, 2, 4)
    assert a.amax is not None
    assert b.amax is not None
    found = alpha(a, b)
    assert tuple(found.shape) == (len(a.amax), len(b.amax))
    for i, x in enumerate(a.amax.numpy()):
        for j, y in enumerate(b.amax.numpy()):
            assert found[i, j] == scalar_gemm.alpha(x, y, expression, (KINDS[left], KINDS[right]))


@pytest.mark.parametrize("expression", ["(a*b)/d", "(b*a)*(1/d)"])
@pytest.mark.parametrize("left", KINDS)
@pytest.mark.parametrize("right", KINDS)
def test_row_scaled_and_4over6_operands_are_multiplied(left: str, right: str, expression: str) -> None:
    a, b = of_kind(left, expression, 3, 3), of_kind(right, expression, 4, 4)
    c, bias = torch.linspace(-3, 3, 12).view(3, 4), torch.linspace(-1, 1, 4)
    assert a.amax is not None
    assert b.amax is not None
    sums = fraction_sums(operand(a), operand(b))
    plain = gemm(a, b, out_dtype=torch.float32)
    added = gemm(a, b, out_dtype=torch.float32, c=c, bias=bias)
    for i, j in np.ndindex(3, 4):
        amaxes = a.amax[i if len(a.amax) > 1 else 0].numpy(), b.amax[j if len(b.amax) > 1 else 0].numpy()
        factor = Fraction(float(scalar_gemm.alpha(*amaxes, expression, (KINDS[left], KINDS[right]))))
        value = scalar_rounding.nearest(factor * Fraction(scalar_rounding.nearest(sums[i, j], "float32")), "float32")
        assert plain[i, j].item() == value
        for addend in (c[i, j].item(), bias[j].item()):
            value = scalar_rounding.nearest(Fraction(value) + Fraction(addend), "float32")
        assert added[i, j].item() == value


# Rotated operands: the product of wgrad, dyᵀ·x, both quantized along the tokens.


def test_rotations_cancel_without_rounding() -> None:
    """Rows of E2M1's grid times Rᵀ are bfloat16 numbers, and their rotation is the grid."""
    r = torch.tensor([[float(v) for v in row] for row in hadamard.rotation(16)])
    generator = torch.Generator().manual_seed(3)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    amax = torch.tensor([2688.0])
    turned, quantized_rows = [], []
    for rows in (5, 6):
        lattice = grid[torch.randint(0, 15, (rows, 64), generator=generator)]
        lattice[:, ::16] = 6.0
        back = (lattice.view(-1, 16) @ r.T).view(rows, 64)
        assert torch.equal(back.bfloat16().float(), back)
        turned.append(back)
        q = quantize_both(back.T.bfloat16(), "nvfp4-rht", rowwise=False, amax=(amax, amax))[1]
        assert q is not None
        assert torch.equal(dequantize(q), lattice)
        assert (q.scales == 0x38).all()
        quantized_rows.append(q)
    assert alpha(*quantized_rows) == 1.0
    y = gemm(*quantized_rows, out_dtype=torch.float32)
    assert torch.equal(y, turned[0] @ turned[1].T)
    assert bounds(*quantized_rows, out_dtype=torch.float32).exact.all()


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("epilogue", ["", "c", "bias", "c and bias"])
@pytest.mark.parametrize("family", ["randn", "wide", "cancel"])
def test_every_step_of_the_epilogue_rounds_to_float32(family: str, epilogue: str, out_dtype: torch.dtype) -> None:
    """The exact sum rounded, times α, plus c, plus the bias, cast: in fractions, each rounded once."""
    a, b = random_pair(family, 7, 5, 4, 64, amax=3.3)
    generator = torch.Generator().manual_seed(8)
    c = (torch.randn(5, 4, generator=generator) * 0.05).to(out_dtype) if "c" in epilogue else None
    bias = torch.randn(4, generator=generator).bfloat16() if "bias" in epilogue else None
    y = gemm(a, b, out_dtype=out_dtype, c=c, bias=bias)
    sums = fraction_sums(operand(a), operand(b))
    factor = Fraction(float(scalar_gemm.alpha(np.float32(3.3), np.float32(3.3), "(a*b)/d")))
    for i in range(5):
        for j in range(4):
            value = scalar_rounding.nearest(
                factor * Fraction(scalar_rounding.nearest(sums[i, j], "float32")), "float32"
            )
            if c is not None:
                value = scalar_rounding.nearest(Fraction(value) + Fraction(c[i, j].item()), "float32")
            if bias is not None:
                value = scalar_rounding.nearest(Fraction(value) + Fraction(bias[j].item()), "float32")
            assert y[i, j].item() == scalar_rounding.nearest(Fraction(value), name(out_dtype))
    assert y.dtype == out_dtype


# Empty shapes, NaN, infinity.


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 32), (2, 0, 32), (0, 0, 32), (2, 3, 0), (0, 3, 0), (0, 3, 2048)])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4-rowscaled"])
@pytest.mark.parametrize("swizzled", [False, True])
def test_an_empty_product_is_empty_or_zero(
    m: int, n: int, k: int, out_dtype: torch.dtype, kind: str, swizzled: bool
) -> None:
    a, b = (quantize(torch.ones(rows, k), kind, swizzled=swizzled) for rows in (m, n))
    y = gemm(a, b, out_dtype=out_dtype)
    assert tuple(y.shape) == (m, n)
    assert y.dtype == out_dtype
    assert not y.any()
    c, bias = torch.full((m, n), 2.0), torch.arange(n).float()
    assert torch.equal(gemm(a, b, out_dtype=out_dtype, c=c, bias=bias), (c + bias).to(out_dtype))


@pytest.mark.parametrize("scale", [0x7F, 0xFF])
@pytest.mark.parametrize("k", [64, 2048])
def test_a_nan_scale_makes_its_row_nan(scale: int, k: int) -> None:
    a, b = random_pair("wide", 12, 4, 5, k)
    clean = gemm(a, b, out_dtype=torch.float32)
    a.scales[1, 2] = scale
    y = gemm(a, b, out_dtype=torch.float32)
    assert y[1].isnan().all()
    others = [0, 2, 3]
    assert torch.equal(bits(y[others]), bits(clean[others]))
    b.scales[3, 0] = scale
    assert gemm(a, b, out_dtype=torch.float32).isnan().tolist() == [
        [i == 1 or j == 3 for j in range(5)] for i in range(4)
    ]


def test_an_infinite_amax_gives_infinities_and_nan() -> None:
    codes = np.array([[2, 2, *[0] * 14], [10, 10, *[0] * 14], [2, 10, *[0] * 14]], np.uint8)
    scales = np.full((3, 1), 0x38, np.uint8)
    a, b = quantized(codes, scales, math.inf), quantized(codes[:1], scales[:1], 1.0)
    y = gemm(a, b, out_dtype=torch.float32).ravel().tolist()
    assert y[:2] == [math.inf, -math.inf]
    assert math.isnan(y[2])


# Errors.


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"columns": 48}, ValueError),
        ({"out_dtype": torch.float64}, TypeError),
        ({"c": torch.ones(3, 2)}, ValueError),
        ({"c": torch.ones(2, 3).double()}, TypeError),
        ({"bias": torch.ones(1, 3)}, ValueError),
        ({"bias": torch.ones(3).int()}, TypeError),
    ],
    ids=["another K", "output of float64", "c of another shape", "c of float64", "bias of two dimensions", "integers"],
)
def test_bounds_raises_the_errors_of_gemm(options: dict[str, Any], error: type[Exception]) -> None:
    """The messages of gemm: tests/spec/test_arguments.py."""
    arguments = {"out_dtype": torch.float32, **options}
    a, b = quantize(torch.ones(2, 32), "nvfp4"), quantize(torch.ones(3, arguments.pop("columns", 32)), "nvfp4")
    with pytest.raises(error) as expected:
        gemm(a, b, **arguments)
    with pytest.raises(error, match=re.escape(str(expected.value))):
        bounds(a, b, **arguments)


CHANGES: list[dict[str, Any]] = [
    {"element": E2M3}, {"transform": Hadamard()}, {"transform": Hadamard(32)}, {"alpha": "(b*a)*(1/d)"},
    {"block": (1, 32)},
]  # fmt: skip


@pytest.mark.parametrize("changed", CHANGES, ids=str)
def test_operands_of_incompatible_recipes_are_refused(changed: dict[str, Any]) -> None:
    a, b = (quantize(torch.ones(rows, 32), "nvfp4") for rows in (2, 3))
    b.recipe = dataclasses.replace(b.recipe, name="mine", **changed)
    (field,) = changed
    for function, (left, right) in itertools.product((gemm, bounds), ((a, b), (b, a))):
        message = rf"gemm cannot multiply {left.recipe} by {right.recipe}: {field} is .* and "
        with pytest.raises(ValueError, match=message):
            function(left, right, out_dtype=torch.float32)


@pytest.mark.parametrize(
    "other", ["nvfp4@te-2.8", "nvfp4-2d", "nvfp4-sr", "nvfp4-rowscaled", "nvfp4-2d-4over6-448-mse"]
)
def test_operands_of_different_recipes_are_multiplied(other: str) -> None:
    """Recipes must agree only in fields that matter for a product. The product of exact inputs is exact."""
    a = quantize(torch.full((2, 32), 6.0), "nvfp4", amax=torch.tensor([2688.0]))
    recipe = find_recipe(other)
    amax = torch.full((3 if recipe.granularity == "row" else 1,), 2688.0)
    b = quantize(
        torch.full((3, 32), 6.0), recipe, amax=amax, random=(1, 2) if recipe.rounding == "stochastic" else None
    )
    assert torch.equal(gemm(a, b, out_dtype=torch.float32), torch.full((2, 3), 36.0 * 32))
    assert torch.equal(gemm(b, a, out_dtype=torch.float32), torch.full((3, 2), 36.0 * 32))
