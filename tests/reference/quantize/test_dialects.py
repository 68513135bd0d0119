"""The dialects of NVFP4: what the libraries gave, and scalar twins of their code, byte for byte."""

from __future__ import annotations

from functools import lru_cache

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.ops import Quantized, dequantize, gemm, quantize
from narrowgauge.reference.quantize.layout import rowwise_codes, unpack
from narrowgauge.spec.formats import E2M1, E4M3, Format
from narrowgauge.spec.recipes import find_recipe, recipe_names
from tests.reference.dialect_twins import TWINS, nearest
from tests.reference.dialect_twins import quantize as twin
from tests.reference.dialect_vectors import NEAREST, VECTORS
from tests.reference.edges import edges
from tests.reference.samples import every_input

SETTINGS = settings(max_examples=50, deadline=None, derandomize=True, database=None)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def codes_of(q: Quantized) -> np.ndarray:
    """Codes (M, K), one a byte."""
    return unpack(rowwise_codes(q), q.shape[1]).numpy()


def as_numpy(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def assert_twin(x: torch.Tensor, dialect: str) -> None:
    try:
        codes, scales = twin(as_numpy(x), dialect)
    except ValueError:
        with pytest.raises(ValueError, match="has no tensor scale for amax"):
            quantize(x, f"nvfp4@{dialect}")
        return
    q = quantize(x, f"nvfp4@{dialect}")
    np.testing.assert_array_equal(q.scales.numpy(), scales)
    np.testing.assert_array_equal(codes_of(q), codes)


def test_every_other_dialect_has_a_twin_and_a_neighbour() -> None:
    names = [name for name in recipe_names() if name.startswith("nvfp4@")]
    # Approximate reciprocals allow several bytes: tests/reference/contracts/test_approximate.py.
    names = [name for name in names if not find_recipe(name).approximate]
    dialects = {name.partition("@")[2] for name in names} - {"te-2.8", "te-native"}
    assert dialects == set(TWINS) == set(NEAREST)


# What the libraries themselves gave.


@pytest.mark.parametrize(
    ("title", "dialect"), [(title, dialect) for title, (_, given_by) in VECTORS.items() for dialect in given_by]
)
def test_a_dialect_gives_the_bytes_of_its_library(title: str, dialect: str) -> None:
    numbers, results = VECTORS[title]
    q = quantize(torch.tensor([numbers], dtype=torch.bfloat16), f"nvfp4@{dialect}")
    assert (bytes(q.scales[0].tolist()).hex(), "".join(f"{code:x}" for code in codes_of(q)[0])) == results[dialect]


@pytest.mark.parametrize("dialect", NEAREST)
def test_a_dialect_is_told_from_its_nearest_neighbour(dialect: str) -> None:
    told = []
    for numbers, results in VECTORS.values():
        if dialect in results:
            x = torch.tensor([numbers], dtype=torch.bfloat16)
            one, other = (quantize(x, f"nvfp4@{name}") for name in (dialect, NEAREST[dialect]))
            told.append(not (torch.equal(one.scales, other.scales) and np.array_equal(codes_of(one), codes_of(other))))
    assert any(told)


# Twins.


@lru_cache
def families() -> dict[str, torch.Tensor]:
    """Inputs in float32 whose every decision is near: scale edges, element ties, zeros, rows of any amplitude."""
    generator = torch.Generator().manual_seed(3)
    randn = torch.randn(12, 48, generator=generator)
    outlier = randn * 1e-3
    outlier[1, 5] = 1e30
    signed = randn.clone()
    signed[:, ::3] = -0.0
    signed[1], signed[2], signed[4], signed[5, :16] = -0.0, 0.0, -1e-4, 1e-30
    grid = torch.tensor(E2M1.values[:8])
    middles = (grid[1:] + grid[:-1]) / 2
    ties = torch.cat([middles, -middles, torch.tensor([6.0, 0.0])])
    near = torch.cat([ties.nextafter(torch.tensor(float("inf"))), ties.nextafter(torch.tensor(0.0)), ties * (1 + 2e-7)])
    middle_rows = torch.cat([ties, near]).view(1, 64).repeat(12, 1) * 2.0 ** -torch.arange(12).view(12, 1) * 448
    halves = (torch.arange(-195, 196).view(1, -1)[:, :384].view(12, 32) / 4) * 2.0 ** -torch.arange(12).view(12, 1)
    halves[0, 0] = 65
    halves[:, 17] = 48.75 * 2.0 ** -torch.arange(12)
    found = {
        "randn": randn,
        "low rows": randn * 2.0 ** (-3.0 * torch.arange(12)).view(12, 1),
        "zeros": torch.zeros(2, 32),
        "negative zeros": -torch.zeros(2, 32),
        "outlier": outlier,
        "signed zeros": signed,
        "element ties": middle_rows,
        "scale ties": halves,
        "largest": (randn * 2.0**125).clamp(-3e38, 3e38),
        "an odd row": randn[:3, :37],
    }
    for name, amax in (("edges", 2688.0), ("edges of 1.37", 2688 * 1.37)):
        found[name] = edges(amax)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("dialect", TWINS)
def test_a_dialect_is_its_scalar_twin_on_every_family(dialect: str, family: str, dtype: torch.dtype) -> None:
    x = families()[family].to(dtype)
    if x.isinf().any():
        x = families()[family].clamp(-6e4, 6e4).to(dtype)
    assert_twin(x, dialect)


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Any finite numbers of any dtype, or of one binade times powers of two; the amax of normal magnitude or 0."""
    dtype = draw(st.sampled_from(DTYPES))
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    small = st.floats(-8, 8, width=16)
    anything = st.floats(-(2.0**15), 2.0**15, width=32)
    some = st.one_of(small, anything, st.sampled_from([0.0, -0.0]))
    numbers = draw(st.lists(some, min_size=rows * columns, max_size=rows * columns))
    shift = draw(st.integers(-20, 0))
    x = (torch.tensor(numbers, dtype=torch.float32).view(rows, columns) * 2.0**shift).to(dtype)
    return torch.zeros_like(x) if x.abs().max() < 2.0**-100 else x


@pytest.mark.long
@pytest.mark.parametrize("dialect", TWINS)
@SETTINGS
@given(x=matrices())
def test_a_dialect_is_its_scalar_twin_on_any_matrix(dialect: str, x: torch.Tensor) -> None:
    assert_twin(x, dialect)


@pytest.mark.parametrize("fmt", [E2M1, E4M3], ids=lambda fmt: fmt.name)
def test_ties_toward_zero_of_every_half_precision_number(fmt: Format) -> None:
    x = every_input(fmt)
    x = x[np.isfinite(x)]
    points = np.array(fmt.values[: fmt.max_code + 1])
    expected = nearest(x, points, tie="zero") | np.signbit(x) * fmt.sign_code
    np.testing.assert_array_equal(encode(torch.from_numpy(x), fmt, ties="zero").numpy(), expected)
    for wide in (float("inf"), float("nan")):
        value = torch.tensor([wide])
        assert encode(value, fmt, ties="zero") == encode(value, fmt)


# Tiles, rows, halves.


# Back to values.


def test_the_factor_of_a_code_is_formed_as_the_library_forms_it() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(6))
    by_hand = {
        "trtllm": lambda s, q: s / q.tensor_scale,
        "torchao": lambda s, q: s * q.tensor_scale,
        "fireworks": lambda s, q: (s * q.amax) * torch.tensor(1 / 2688),
        "qwantize": lambda s, q: s,
    }
    for dialect, factor in by_hand.items():
        q = quantize(x, f"nvfp4@{dialect}")
        factors = factor(torch.tensor(E4M3.values)[q.scales.int()], q).repeat_interleave(16, 1)
        values = torch.tensor(E2M1.values)[torch.from_numpy(codes_of(q)).int()]
        assert torch.equal(dequantize(q), values * factors)


def test_a_tensor_of_zeros_decodes_to_zeros_where_its_scale_is_0() -> None:
    q = quantize(torch.zeros(2, 32), "nvfp4@trtllm")
    assert q.tensor_scale == 0
    assert not dequantize(q).any()
    assert not gemm(q, q, out_dtype=torch.float32).any()


@pytest.mark.parametrize("dialect", TWINS)
def test_a_product_is_that_of_the_values(dialect: str) -> None:
    generator = torch.Generator().manual_seed(7)
    a, b = (quantize(torch.randn(rows, 64, generator=generator), f"nvfp4@{dialect}") for rows in (5, 3))
    exact = dequantize(a).double() @ dequantize(b).double().T
    scale = dequantize(a).double().abs() @ dequantize(b).double().abs().T
    # α and the factor of a value have at most four roundings each, the sum and its product with α a single rounding.
    assert ((gemm(a, b, out_dtype=torch.float32) - exact).abs() <= 16 * 2.0**-24 * scale).all()


def test_breccia_packs_the_first_element_high() -> None:
    q = quantize(torch.tensor([[6.0, 1.0] + [0.0] * 14]), "nvfp4@breccia")
    assert q.codes[0, 0] == 0x72
    assert quantize(torch.tensor([[6.0, 1.0, 3.0]]), "nvfp4@breccia").codes.tolist() == [[0x72, 0x50]]


# Errors.


def test_an_amax_that_fp_quant_refuses_is_named() -> None:
    with pytest.raises(ValueError, match=r"recipe nvfp4@fp-quant has no tensor scale for amax 0.0: .* is inf"):
        quantize(torch.zeros(1, 16), "nvfp4@fp-quant")
    with pytest.raises(ValueError, match=r"for amax inf: .* is 0.0"):
        quantize(torch.full((1, 16), float("inf")), "nvfp4@fp-quant")
    amax = torch.tensor([1.0, 0.0])
    with pytest.raises(ValueError, match=r"recipe nvfp4-rowscaled@fp-quant has no tensor scale for amax 0.0"):
        quantize(torch.ones(2, 16), "nvfp4-rowscaled@fp-quant", amax=amax)
