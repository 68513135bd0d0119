"""quantize: golden bytes of every recipe; NVFP4 against the scalar definition; special values, shapes, layouts."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from narrowgauge.reference.ops import dequantize, quantize, quantize_both
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from tests.golden import assert_golden, bits, golden
from tests.reference.samples import MIDPOINTS, NASTY
from tests.reference.twins import assert_same, assert_twin, elements

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SETTINGS = settings(max_examples=80, deadline=None, derandomize=True, database=None)
FLT_MAX = torch.finfo(torch.float32).max


# Golden bytes of Transformer Engine.


def both_and_alone(x: torch.Tensor, name: str) -> tuple[Quantized | None, Quantized | None]:
    """`quantize_both`. Checks that `quantize` gives each half, if the columnwise half is the quantized transpose."""
    recipe = find_recipe(name)
    row, column = quantize_both(x, name)
    assert row is not None
    assert column is not None
    pairs = [(row, quantize(x, recipe.rowwise))]
    if not column.transposed and (recipe.candidates == "6" or recipe.block[0] == 1):
        pairs.append((column, quantize(x.T.contiguous(), recipe)))
    for half, alone in pairs:
        assert torch.equal(half.codes, alone.codes)
        assert torch.equal(half.scales, alone.scales)
    return row, column


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", golden("quantize_*.npz"))
def test_golden_bytes_of_every_recipe(path: Path) -> None:
    assert_golden(path, both_and_alone)


# The scalar twin.

NASTY_FLOATS = st.sampled_from([float(np.float32(value)) for value in NASTY])
# A power of two times a tie: midpoints of E2M1, and amaxes with a ratio that is a midpoint of E4M3.
TIES = st.builds(
    lambda value, exponent, sign: sign * math.ldexp(value, exponent),
    st.sampled_from([*MIDPOINTS, 65.0, 48.75, 6.0, 4.0, 8.5, 9.5]),
    st.sampled_from([0, 0, 0, 1, -1, -4, -8]),
    st.sampled_from([1.0, -1.0]),
)
TINY = st.floats(-(2.0**-123), 2.0**-123, width=32)
ANY = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
MATRICES = st.one_of(
    *(
        arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 35)), elements=some, fill=st.nothing())
        for some in (
            st.floats(-8, 8, width=32),
            TIES,
            st.one_of(TIES, TINY),
            ANY,
            st.one_of(TIES, NASTY_FLOATS),
        )
    )
)


@SETTINGS
@given(MATRICES, st.sampled_from(["te", "te-2.8"]), st.sampled_from(["ignore", "propagate"]))
def test_quantize_is_its_scalar_twin(x: np.ndarray, dialect: str, nan: str) -> None:
    recipe = dataclasses.replace(find_recipe(f"nvfp4@{dialect}"), nan=nan)  # type: ignore[arg-type]
    assert_twin(quantize(torch.from_numpy(x), recipe), torch.from_numpy(x))


@SETTINGS
@given(MATRICES, st.one_of(NASTY_FLOATS, TIES, ANY).map(abs))
def test_quantize_with_a_given_amax_is_its_scalar_twin(x: np.ndarray, amax: float) -> None:
    given_amax = torch.tensor([amax])
    q = quantize(torch.from_numpy(x), "nvfp4", amax=given_amax)
    assert_twin(q, torch.from_numpy(x), amax=given_amax)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_is_its_scalar_twin(dtype: torch.dtype) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = patterns.view(-1, 64)
    amax = torch.tensor([448.0])
    assert_twin(quantize(x, "nvfp4", amax=amax), x, amax=amax)


def test_every_exponent_of_the_amax_is_the_scalar_twins() -> None:
    """Tensors with an amax of a power of two, and just below, from the smallest subnormal number to FLT_MAX."""
    pattern = torch.tensor([[1.0, -0.75, 0.5, 0.31, 0.25, -0.1, 0.04, 0.01, 1e-3, 0.0]])
    for exponent in range(-149, 128):
        for factor in (1.0, 1 - 2.0**-24):
            x = (pattern.double() * math.ldexp(factor, exponent)).float()
            assert_twin(quantize(x, "nvfp4"), x)


# Special values: the paragraph of docs/numerics.md#nvfp4, statement by statement.


def one_block(*numbers: float, rest: float = 0.0) -> torch.Tensor:
    return torch.tensor([[*numbers, *[rest] * (16 - len(numbers))]])


def test_ties_of_e2m1_go_to_the_even_code() -> None:
    """Midpoints .25→0 .75→1 1.25→1 1.75→2 2.5→2 3.5→4 5→4, under S_enc = 1 and a block scale of 1."""
    ties = torch.tensor([MIDPOINTS])
    up, down = (torch.nextafter(ties, torch.tensor(limit)) for limit in (math.inf, 0.0))
    six = torch.tensor([[6.0]])
    amax = torch.tensor([2688.0])
    for sign, bit in ((1, 0), (-1, 8)):
        for x, expected in ((ties, [0, 2, 2, 4, 4, 6, 6]), (down, [0, 1, 2, 3, 4, 5, 6]), (up, [1, 2, 3, 4, 5, 6, 7])):
            q = quantize(torch.cat([sign * x, six], dim=1), "nvfp4", amax=amax)
            assert q.scales.tolist() == [[0x38]]
            assert elements(q)[0, :-1].tolist() == [code | bit for code in expected]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_nan_is_code_7_and_the_amax_ignores_it(dtype: torch.dtype, sign: int) -> None:
    clean = one_block(1.0, 0.0, -3.0, rest=0.5).to(dtype)
    dirty = clean.clone()
    dirty[0, 1] = sign * math.nan
    q, expected = quantize(dirty, "nvfp4"), quantize(clean, "nvfp4")
    assert torch.equal(q.scales, expected.scales)
    assert q.amax == expected.amax == 3.0
    codes = elements(expected)
    codes[0, 1] = 7
    assert torch.equal(elements(q), codes)


def test_a_propagating_nan_makes_every_scale_nan() -> None:
    x = torch.ones(3, 48)
    x[1, 20] = math.nan
    q = quantize(x, dataclasses.replace(find_recipe("nvfp4"), nan="propagate"))
    assert q.amax is not None
    assert q.amax.isnan().all()
    assert (q.scales == 0x7F).all()
    assert dequantize(q).isnan().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_infinity_gives_an_encode_scale_of_1(sign: int) -> None:
    block = one_block(sign * math.inf, 448.0, 1344.0, 2688.0, 100.0)
    q = quantize(torch.cat([block, one_block(6.0, 1.0)], dim=1), "nvfp4")
    assert q.amax == math.inf
    assert q.tensor_scale == 1.0
    assert q.scales.tolist() == [[0x7E, 0x38]]
    assert elements(q)[0, :5].tolist() == [7 if sign > 0 else 15, 2, 5, 7, 0]
    assert elements(q)[0, 16:18].tolist() == [7, 2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_zeros_has_scales_0_and_codes_0(dtype: torch.dtype) -> None:
    q = quantize(torch.zeros(3, 40, dtype=dtype), "nvfp4")
    assert q.amax == 0
    assert q.tensor_scale == 1.0
    assert not q.scales.any()
    assert not q.codes.any()
    assert not dequantize(q).any()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_block_far_below_the_amax_has_scale_0(sign: int) -> None:
    """bamax/gamax <= 2^-10/448 = 2.18e-6: a tie of E4M3's smallest number with 0; one ulp more is not."""
    edge = 6 * 2.0**-10
    above = float(np.nextafter(np.float32(edge), np.float32(1)))
    x = torch.cat([one_block(2688.0), one_block(sign * edge, edge / 9, 0.0, -0.0), one_block(sign * above)], dim=1)
    q = quantize(x, "nvfp4")
    assert q.scales.tolist() == [[0x7E, 0, 1]]
    assert elements(q)[0, 16:20].tolist() == [7 if sign > 0 else 15, 7, 0, 8]
    assert not dequantize(q)[0, 16:32].any()
    assert f"{edge / 2688:.3g}" == "2.18e-06"


# Shapes, layouts, bookkeeping.


@pytest.mark.parametrize("shape", [(0, 0), (0, 16), (0, 17), (5, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_matrix_gives_empty_codes_and_amax_0(shape: tuple[int, int], dtype: torch.dtype) -> None:
    q = quantize(torch.zeros(shape, dtype=dtype), "nvfp4")
    assert tuple(q.codes.shape) == (shape[0], -(-shape[1] // 2))
    assert tuple(q.scales.shape) == (shape[0], -(-shape[1] // 16))
    assert q.amax is not None
    assert q.amax.tolist() == [0.0]
    assert tuple(dequantize(q).shape) == shape


@pytest.mark.parametrize("shape", [(2, 3, 40), (2, 1, 3, 16), (0, 3, 16), (2, 3, 0), (1, 0, 4, 20)])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d", "nvfp4-rowscaled"])
def test_more_dimensions_are_rows(shape: tuple[int, ...], name: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    flat = x.flatten(0, -2)
    for view in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        q = quantize(view, name)
        assert q.shape == tuple(flat.shape)
        assert_same(q, quantize(flat, name))
        for one, other in zip(quantize_both(view, name), quantize_both(flat, name), strict=True):
            assert_same(one, other)


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Views of the same numbers that differ in strides."""
    base = (torch.randn(96, 160, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    wide = torch.stack([base, base + 1], dim=2)
    return {
        "transposed": base.T,
        "every other row": base[::2],
        "every other column": base[:, ::2],
        "columns from the middle": base[:, 7:72],
        "interleaved": wide[:, :, 1],
        "one column as a row": base[:, :1].T,
        "one row": base[3:4, 1:],
        "a repeated row": base[:1].expand(5, -1),
        "a repeated column": base[:, :1].expand(-1, 33),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", layouts(torch.float32))
def test_a_view_gives_the_bytes_of_its_copy(layout: str, dtype: torch.dtype) -> None:
    view = layouts(dtype)[layout]
    copy = view.clone(memory_format=torch.contiguous_format)
    assert view.stride() != copy.stride() or view.storage_offset() != 0
    q = quantize(view, "nvfp4")
    assert_same(q, quantize(copy, "nvfp4"))
    assert q.codes.is_contiguous()
    assert q.scales.is_contiguous()


@pytest.mark.parametrize("shape", [(300, 1024), (1, (1 << 18) + 5), (3, (1 << 18) - 8), ((1 << 18) + 3, 1)])
def test_a_large_matrix_is_the_sum_of_its_parts(shape: tuple[int, int]) -> None:
    """Parts of a matrix that is larger than a slab of the reference give the same bytes."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)) ** 3
    q = quantize(x, "nvfp4")
    assert q.amax == x.abs().max()
    rows, columns = shape[0] // 3 + 1, shape[1] // 48 * 16 + 16
    for top in range(0, shape[0], rows):
        for left in range(0, shape[1], columns):
            part = quantize(x[top : top + rows, left : left + columns], "nvfp4", amax=q.amax)
            high, wide = part.codes.shape
            assert torch.equal(part.codes, q.codes[top : top + high, left // 2 : left // 2 + wide])
            wide = part.scales.shape[1]
            assert torch.equal(part.scales, q.scales[top : top + high, left // 16 : left // 16 + wide])


def test_the_first_element_of_a_pair_is_in_the_low_nibble() -> None:
    q = quantize(one_block(6.0, -4.0, 0.5, 1.0), "nvfp4", amax=torch.tensor([2688.0]))
    assert q.codes[0, :3].tolist() == [0xE7, 0x21, 0x00]


def test_a_given_amax_replaces_the_tensors_own() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(3))
    own = quantize(x, "nvfp4")
    assert own.amax is not None
    assert_same(quantize(x, "nvfp4", amax=own.amax.clone()), own)
    larger = quantize(x, "nvfp4", amax=own.amax * 4)
    assert torch.equal(larger.amax, own.amax * 4)
    assert torch.equal(larger.scales, own.scales - 16)  # two binades down
    assert torch.equal(larger.codes, own.codes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_inputs_come_back_unchanged(dtype: torch.dtype) -> None:
    x = torch.tensor([[*MIDPOINTS, math.nan, -math.nan, -0.0, math.inf, -1e-4]]).to(dtype)
    amax = torch.tensor([3.0])
    before = bits(x).clone()
    quantize(x, "nvfp4", amax=amax)
    quantize(x, dataclasses.replace(find_recipe("nvfp4"), nan="propagate"))
    assert torch.equal(bits(x), before)
    assert amax == 3.0
