"""Stochastic rounding: the probability by all 256 bytes, the byte of an element, words of the generator, errors."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.numbers.rounding import stochastic
from narrowgauge.reference.ops import quantize, quantize_both
from narrowgauge.reference.scalar import philox, rounding
from narrowgauge.spec.formats import E2M1
from tests.golden import bits
from tests.reference.samples import matrix
from tests.reference.twins import assert_same, assert_twin, elements

SETTINGS = settings(max_examples=300, deadline=None, derandomize=True, database=None)
BYTES = torch.arange(256).to(torch.uint8)
GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ONE = torch.tensor([2688.0])  # an amax under which S_enc is 1


def enumerated(magnitudes: torch.Tensor) -> torch.Tensor:
    """Every number under every byte: (n,) float32 to (n, 256)."""
    x = magnitudes.unsqueeze(1).expand(-1, 256).contiguous()
    return stochastic(x, E2M1, BYTES.expand_as(x).contiguous())


def near_grid() -> torch.Tensor:
    """float32: grid points ± 3 ulp."""
    found = [np.float32(point) for point in GRID]
    for limit in (np.float32(math.inf), np.float32(0)):
        near = found[: len(GRID)]
        for _ in range(3):
            near = [np.nextafter(x, limit) for x in near]
            found += near
    return torch.from_numpy(np.array(found))


def halves(dtype: torch.dtype) -> torch.Tensor:
    """Every positive number of a 16-bit dtype up to 8, as float32."""
    patterns = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    return patterns[patterns <= 8]


MAGNITUDES = {"grid": near_grid(), "bfloat16": halves(torch.bfloat16), "float16": halves(torch.float16)}
EVERY = pytest.mark.parametrize("magnitudes", MAGNITUDES.values(), ids=MAGNITUDES)


# Probability.


@pytest.mark.sampled(2)
@EVERY
def test_as_many_bytes_round_up_as_the_distance_has_256ths(magnitudes: torch.Tensor) -> None:
    """P(up) = ⌊256·f⌋/256, f the exact distance from the point below in steps; else the point below. Above 6, 6."""
    rounded = enumerated(magnitudes)
    points = [Fraction(point) for point in GRID]
    for x, row in zip(magnitudes.tolist(), rounded.tolist(), strict=True):
        below = max(point for point in points if point <= Fraction(x))
        above = min((point for point in points if point > Fraction(x)), default=below)
        up = math.floor(256 * (Fraction(x) - below) / (above - below)) if above > below else 0
        assert row == [float(below)] * (256 - up) + [float(above)] * up


def test_what_is_not_finite_or_above_6_saturates_and_nan_stays() -> None:
    large = torch.tensor([6.0, 6.0000005, 7.0, 8.0, 1e30, 3.4028234663852886e38, math.inf])
    assert (enumerated(large) == 6).all()
    assert (enumerated(-large) == -6).all()
    assert enumerated(torch.tensor([math.nan, -math.nan])).isnan().all()
    assert (encode(enumerated(torch.tensor([math.nan, -math.nan])), E2M1) == E2M1.max_code).all()


def test_the_sum_rounds_once_to_float32() -> None:
    """docs/numerics.md#stochastic-rounding: t = fma(u, step, |v|). An ulp below 1/512 rounds up with byte 255, though f
    is below 1/256."""
    x = np.nextafter(np.float32(1 / 512), np.float32(0))
    assert math.floor(256 * Fraction(float(x)) * 2) == 0
    assert enumerated(torch.tensor([x]))[0].tolist() == [0.0] * 255 + [0.5]
    assert rounding.stochastic(float(x), 255, E2M1) == 1


FLOATS = st.one_of(
    st.floats(width=32),
    st.floats(-8, 8, width=32),
    # Near a multiple of step/256, where the sum is near a point of the grid.
    st.builds(
        lambda n, ulps: float(np.float32(n / 512) + np.float32(ulps) * np.spacing(np.float32(n / 512))),
        st.integers(0, 512 * 7),
        st.integers(-3, 3),
    ),
)


@SETTINGS
@given(FLOATS, st.integers(0, 255))
def test_it_is_its_scalar_twin(x: float, byte: int) -> None:
    found = stochastic(torch.tensor([x]), E2M1, torch.tensor([byte], dtype=torch.uint8))
    expected = rounding.stochastic(x, byte, E2M1)
    assert encode(found, E2M1).item() == expected
    assert math.isnan(x) or torch.equal(bits(found), bits(torch.tensor([E2M1.value(expected)])))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gfloat_rounds_so_too(dtype: torch.dtype) -> None:
    """Its `StochasticFastest` adds the bits to the exact distance, which no number here makes round."""
    why = "gfloat is not installed: pip install gfloat"
    gfloat = pytest.importorskip("gfloat", reason=why)
    fmt = pytest.importorskip("gfloat.formats", reason=why).format_info_ocp_e2m1
    magnitudes = halves(dtype)
    magnitudes = magnitudes[magnitudes >= 2.0**-10]
    numbers = torch.cat([magnitudes, -magnitudes])
    x = numbers.unsqueeze(1).expand(-1, 256).double().numpy()
    each = np.broadcast_to(np.arange(256), x.shape)
    mode = gfloat.RoundMode.StochasticFastest
    theirs = gfloat.round_ndarray(fmt, x, mode, sat=True, srbits=each, srnumbits=8)
    np.testing.assert_array_equal(enumerated(numbers).numpy(), theirs)


# The byte of each element.


def quarters(rows: int, columns: int) -> torch.Tensor:
    """¼ rounds up by bytes from 128 on; a 6 at the start of each block keeps its scale at 1."""
    x = torch.full((rows, columns), 0.25)
    x[:, ::16] = 6.0
    return x


@pytest.mark.parametrize("columns", [16, 20, 31, 33, 64])
def test_byte_i_of_word_j_is_that_of_element_4j_plus_i(columns: int) -> None:
    x = quarters(2, columns)
    for row in range(2):
        for column in range(columns):
            bits_given = torch.zeros(2, -(-columns // 4), dtype=torch.int32)
            word = 0x80 << 8 * (column % 4)
            bits_given[row, column // 4] = word - (word >> 31 << 32)
            expected = torch.where(x == 6, 7, 0)
            if x[row, column] != 6:
                expected[row, column] = 1
            found = elements(quantize(x, "nvfp4-sr", amax=ONE, random=bits_given))
            assert torch.equal(found, expected.to(torch.uint8))


@pytest.mark.parametrize("name", ["nvfp4-sr", "nvfp4-2d-sr", "nvfp4-rht-sr", "nvfp4-2d-rht-sr"])
def test_scales_are_those_of_rounding_to_nearest(name: str) -> None:
    x = matrix("normal", 2, 33, 64).bfloat16()
    q, nearest = quantize(x, name, random=(3, 4)), quantize(x, name.removesuffix("-sr"))
    assert torch.equal(q.scales, nearest.scales)
    assert torch.equal(q.amax, nearest.amax)
    assert not torch.equal(q.codes, nearest.codes)


# Words from a seed and an offset.


@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (5, 20), (2, 35), (7, 64)])
@pytest.mark.parametrize("name", ["nvfp4-sr", "nvfp4-2d-sr"])
def test_a_seed_and_an_offset_stand_for_the_words_of_philox(name: str, shape: tuple[int, int]) -> None:
    x = matrix("normal", 4, *shape)
    seed, offset = 0x1234_5678_9ABC_DEF0, 0xFEDC_BA98_7654_3210
    made = philox.philox_words(seed, offset, *shape)
    q = quantize(x, name, random=(seed, offset))
    assert_twin(q, x, words=made)
    cut = torch.from_numpy(made.view(np.int32)[:, : -(-shape[1] // 4)].copy())
    assert_same(q, quantize(x, name, random=cut))


def test_a_large_matrix_counts_its_blocks_through() -> None:
    """More than a slab of the reference; blocks have different words."""
    x = quarters(300, 1024)
    q = quantize(x, "nvfp4-sr", amax=ONE, random=(5, 6))
    made = philox.philox_words(5, 6, 300, 1024)
    assert len(np.unique(made.reshape(-1, 4), axis=0)) == 300 * 64
    assert_same(q, quantize(x, "nvfp4-sr", amax=ONE, random=torch.from_numpy(made.view(np.int32))))


def test_the_columnwise_half_draws_from_the_next_offset() -> None:
    x = quarters(64, 64)
    x = torch.minimum(x, x.T)
    row, column = quantize_both(x, "nvfp4-sr", amax=(ONE, ONE), random=(7, 8))
    assert_same(row, quantize(x, "nvfp4-sr", amax=ONE, random=(7, 8)))
    assert_same(column, quantize(x.T, "nvfp4-sr", amax=ONE, random=(7, 9)))
    assert row is not None
    assert column is not None
    assert not torch.equal(row.codes, column.codes)
    assert not torch.equal(elements(row).T, elements(column))
