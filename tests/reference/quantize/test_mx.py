"""MX recipes: the scalar definition, every code under every scale, special values, halves, sections, random bits."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.numbers.rounding import stochastic
from narrowgauge.reference.ops import dequantize, quantize, quantize_both, quantize_grouped
from narrowgauge.reference.quantize.layout import pack
from narrowgauge.reference.scalar import mx, philox
from narrowgauge.reference.scalar import rounding as scalar_rounding
from narrowgauge.spec.formats import E2M1, E8M0, Format
from narrowgauge.spec.quantized import Quantized, codes_shape, scales_shape
from narrowgauge.spec.recipes import find_recipe, recipe_names
from tests.golden import bits
from tests.reference.mx_exponents import DIALECTS, ELEMENTS, NAMES
from tests.reference.samples import MATRICES, matrix, words
from tests.reference.twins import rowwise_elements

SETTINGS = settings(max_examples=50, deadline=None, derandomize=True, database=None)
ELEMENT = pytest.mark.parametrize("element", ELEMENTS, ids=lambda fmt: fmt.name)
ALL = [name for name in recipe_names() if name.startswith("mxfp") and "@" not in name]
NEAREST = [name for name in ALL if not name.endswith("-sr")]


def tiled(element: Format) -> str:
    return "mxfp8-2d" if NAMES[element] == "mxfp8-e4m3" else f"{NAMES[element]}-2d"


def random_of(name: str, rows: int, columns: int, seed: int = 1) -> torch.Tensor | None:
    return words(seed, rows, columns) if name.endswith("-sr") else None


# Twins.


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dialect", DIALECTS)
@SETTINGS
@given(
    element=st.sampled_from(ELEMENTS), tile=st.booleans(), family=st.sampled_from(MATRICES), seed=st.integers(0, 2**32),
    rows=st.integers(1, 3), columns=st.integers(1, 70), nan=st.sampled_from(["ignore", "propagate"]),
)  # fmt: skip
def test_a_recipe_is_its_twin(
    dialect: str, element: Format, tile: bool, family: str, seed: int, rows: int, columns: int, nan: str
) -> None:
    base = tiled(element) if tile else NAMES[element]
    recipe = dataclasses.replace(find_recipe(f"{base}@{dialect}"), nan=nan)  # type: ignore[arg-type]
    x = matrix(family, seed, rows, columns)
    q = quantize(x, recipe)
    codes, scales = mx.quantize(x.numpy(), recipe)
    np.testing.assert_array_equal(q.scales.numpy(), scales)
    np.testing.assert_array_equal(rowwise_elements(q).numpy(), codes)
    assert q.amax is None
    assert q.tensor_scale is None


# Special values.


def row_of(*numbers: float, columns: int = 32) -> torch.Tensor:
    return torch.tensor([[*numbers, *[0.0] * (columns - len(numbers))]])


@ELEMENT
def test_the_amax_ignores_nan_and_nan_has_a_code(element: Format) -> None:
    """0x7F in E4M3 and E5M2; the largest positive code in formats without NaN."""
    nans = torch.tensor([0x7FC00000, 0x7F800001, -0x400000, -1], dtype=torch.int32).view(torch.float32)
    x = row_of(1.0, *[0.0] * 4)
    x[0, 1:5] = nans
    q, plain = quantize(x, NAMES[element]), quantize(row_of(1.0), NAMES[element])
    code = {"E2M1": 7, "E2M3": 31, "E3M2": 31}.get(element.name, 0x7F)
    assert rowwise_elements(q)[0, 1:5].tolist() == [code] * 4
    assert torch.equal(q.scales, plain.scales)
    assert torch.equal(rowwise_elements(q)[0, 5:], rowwise_elements(plain)[0, 5:])
    only = quantize(torch.full((1, 32), math.nan), NAMES[element])
    assert only.scales.tolist() == [[0]]
    propagated = quantize(x, dataclasses.replace(find_recipe(NAMES[element]), nan="propagate"))
    assert propagated.scales.tolist() == [[255]]
    assert set(rowwise_elements(propagated)[0].tolist()) == {code}
    assert dequantize(propagated).isnan().all()


def test_a_nan_makes_its_block_or_tile_nan() -> None:
    x = matrix("normal", 3, 64, 96)
    x[40, 50] = math.nan
    for name, spoiled in (("mxfp8-e4m3", [(40, 1)]), ("mxfp8-2d", [(row, 1) for row in range(32, 64)])):
        q = quantize(x, dataclasses.replace(find_recipe(name), nan="propagate"))
        assert [tuple(at) for at in (q.scales == 255).nonzero().tolist()] == spoiled


# Elements.


@pytest.mark.sampled(2)
@ELEMENT
def test_every_value_under_every_scale_is_kept(element: Format) -> None:
    """All codes by all scales without overflow of float32; the largest number of a block determines its scale."""
    values = torch.tensor([v for v in element.values if math.isfinite(v)])
    for code in range(255):
        row = (values.double() * 2.0 ** (code - 127)).float()
        if not row.isfinite().all():
            assert code > 255 - mx.EMAX[element] - 1
            continue
        x = torch.nn.functional.pad(row, (0, -len(row) % 32)).view(-1, 32)
        x[:, -1] = float(element.max * 2.0 ** (code - 127))
        q = quantize(x, NAMES[element])
        assert (q.scales == code).all()
        assert torch.equal(bits(dequantize(q)), bits(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@ELEMENT
def test_dequantize_of_every_code_under_every_scale(element: Format, dtype: torch.dtype) -> None:
    """Scale code 0 is 2^-127, 255 is NaN. The exact product is rounded to float32, then to the dtype."""
    codes = torch.arange(max(32, element.codes), dtype=torch.int32) % element.codes
    blocks = len(codes) // 32
    scales = torch.arange(256, dtype=torch.uint8)
    kept = codes.to(torch.uint8).expand(256, -1).contiguous()
    kept = pack(kept) if element.bits == 4 else kept
    q = Quantized(
        kept, scales.view(-1, 1).expand(-1, blocks).contiguous(), None, find_recipe(NAMES[element]), (256, len(codes))
    )
    values = torch.tensor([element.values[c] for c in codes.tolist()], dtype=torch.float64)
    factors = torch.tensor(E8M0.values, dtype=torch.float64)
    exact = (values * factors.view(-1, 1)).float().to(dtype)  # float64 holds the product
    found = dequantize(q, dtype)
    assert torch.equal(found.isnan(), exact.isnan())
    assert found[255].isnan().all()
    assert torch.equal(bits(found.nan_to_num(nan=0.0)), bits(exact.nan_to_num(nan=0.0)))


@ELEMENT
def test_an_element_is_rounded_once(element: Format) -> None:
    """Every midpoint of the format, ± 1 ulp, under small and large scales."""
    grid = [float(point) for point in scalar_rounding.grid(element)[: element.max_code + 1]]
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(grid)])
    near = torch.cat([middles, middles.nextafter(torch.tensor(math.inf)), middles.nextafter(torch.tensor(0.0))])
    near = torch.cat([near, -near])
    expected = torch.tensor([scalar_rounding.encode(v, element) for v in near.tolist()], dtype=torch.uint8)
    x = torch.nn.functional.pad(near, (0, -len(near) % 31)).view(-1, 31)
    x = torch.cat([torch.full((len(x), 1), element.max), x], 1)
    for power in (-100, -17, 0, 5, 100):
        q = quantize(x * 2.0**power, NAMES[element])
        assert (q.scales == power + 127).all()
        assert torch.equal(rowwise_elements(q)[:, 1:].flatten()[: len(near)], expected)


@ELEMENT
def test_ocp_saturates_numbers_that_te_does_not(element: Format) -> None:
    above = float(element.max) * (1 + 2.0**-10)
    for dialect, scale, code in (("ocp", 127, element.max_code), ("te", 128, None)):
        q = quantize(row_of(above, -above), f"{NAMES[element]}@{dialect}")
        assert q.scales.tolist() == [[scale]]
        expected = scalar_rounding.encode(above / 2, element) if code is None else code
        assert rowwise_elements(q)[0, :2].tolist() == [expected, expected | element.sign_code]


# Halves, layouts, sections.


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(64, 96), (1, 1), (33, 70), (130, 3), (3, 130), (0, 0), (0, 40), (40, 0)])
@pytest.mark.parametrize("name", ALL)
def test_each_half_is_what_quantize_gives(name: str, shape: tuple[int, int]) -> None:
    """The columnwise half of MXFP8 and MXFP6 is stored like x, the half of MXFP4 like the transpose."""
    x, recipe = matrix("spread", 1, *shape), find_recipe(name)
    random = (random_of(name, *shape), random_of(name, *shape[::-1], seed=2))
    row, column = quantize_both(x, name, random=random if name.endswith("-sr") else None)
    first, second = quantize(x, name, random=random[0]), quantize(x.T.contiguous(), name, random=random[1])
    assert row is not None
    assert column is not None
    assert (row.transposed, column.transposed) == (False, recipe.columnwise == "in-place")
    assert column.transposed == (recipe.element is not E2M1)
    for half, alone in ((row, first), (column, second)):
        assert half.shape == alone.shape
        assert tuple(half.codes.shape) == codes_shape(half.shape, recipe, transposed=half.transposed)
        assert tuple(half.scales.shape) == scales_shape(half.shape, recipe, transposed=half.transposed)
        assert half.codes.is_contiguous()
        assert half.scales.is_contiguous()
        assert torch.equal(half.codes.T if half.transposed else half.codes, alone.codes)
        assert torch.equal(half.scales.T if half.transposed else half.scales, alone.scales)
        assert torch.equal(bits(dequantize(half)), bits(dequantize(alone)))
    if column.transposed:
        assert tuple(column.codes.shape) == shape
        assert tuple(column.scales.shape) == (-(-shape[0] // 32), shape[1])


SIZES = {
    "plain": [32, 64, 32],
    "no multiples": [1, 33, 5, 70],
    "empty": [0, 7, 0, 40, 0],
    "none": [0, 0],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("name", NEAREST)
def test_each_section_is_what_quantize_gives_for_it(name: str, columnwise: bool, sizes: list[int]) -> None:
    x = matrix("spread", 4, sum(sizes), 45)
    grouped = quantize_grouped(x, torch.tensor(sizes), name, columnwise=columnwise)
    assert grouped.amax is None
    assert grouped.tensor_scale is None
    parts = grouped.sections()
    assert len(parts) == len(sizes)
    for part, section in zip(parts, torch.split(x, sizes), strict=True):
        row, column = quantize_both(section, name)
        alone = column if columnwise else row
        assert alone is not None
        assert (part.shape, part.transposed) == (alone.shape, alone.transposed)
        assert torch.equal(part.codes, alone.codes)
        assert torch.equal(part.scales, alone.scales)
        assert torch.equal(dequantize(part), dequantize(alone))


# Stochastic rounding.


BYTES = torch.arange(256).to(torch.uint8)


def points_of(element: Format) -> torch.Tensor:
    """The grid from 0 to the largest number, float64."""
    points = scalar_rounding.grid(element)[: element.max_code + 1]
    return torch.tensor([float(point) for point in points], dtype=torch.float64)


def halves(element: Format) -> torch.Tensor:
    """Every number of bfloat16 from a thousandth of the smallest step to beyond the largest number, and 0."""
    patterns = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    smallest = 2.0 ** (1 - element.bias - element.mantissa_bits)
    return patterns[(patterns <= 4 * element.max) & (patterns >= smallest / 1024) | (patterns == 0)]


def near_grid(element: Format) -> torch.Tensor:
    """float32 up to 3 ulp to either side of each point of the grid."""
    near = [points_of(element).float()]
    for limit in (math.inf, 0.0):
        step = near[0]
        for _ in range(3):
            step = step.nextafter(torch.tensor(limit))
            near.append(step)
    return torch.cat(near).unique()


def enumerated(x: torch.Tensor, element: Format) -> torch.Tensor:
    """Every number under every byte: (n,) float32 to (n, 256)."""
    wide = x.unsqueeze(1).expand(-1, 256).contiguous()
    return stochastic(wide, element, BYTES.expand_as(wide).contiguous())


def neighbours(x: torch.Tensor, element: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Grid points at or below |x|, and above |x| (at most the largest number), float64."""
    points = points_of(element)
    below = torch.searchsorted(points, x.double(), right=True) - 1
    return points[below], points[(below + 1).clamp(max=element.max_code)]


@ELEMENT
def test_the_distance_is_the_number_of_bytes_that_round_up(element: Format) -> None:
    """P(up) = ⌊256·f⌋/256, with f the distance from the lower grid point in steps of the grid."""
    x = halves(element)
    low, high = neighbours(x, element)
    up = torch.where(high > low, 256 * (x.double() - low) / (high - low).clamp(min=2.0**-60), 0.0).floor()
    expected = torch.where(torch.arange(256) < 256 - up.unsqueeze(1), low.unsqueeze(1), high.unsqueeze(1))
    assert torch.equal(enumerated(x, element).double(), expected)
    assert len(up.unique()) == 256


@ELEMENT
def test_the_sum_rounds_once_to_float32(element: Format) -> None:
    """A number an ulp below a distance can round up, although ⌊256·f⌋ does not count it:
    docs/numerics.md#stochastic-rounding."""
    x = near_grid(element)
    low, high = neighbours(x, element)
    summed = (x.double().unsqueeze(1) + BYTES.double() / 256 * (high - low).unsqueeze(1)).float()
    expected = neighbours(summed.flatten(), element)[0].view(-1, 256)
    rounded = enumerated(x, element).double()
    assert torch.equal(rounded, expected)
    beside = x[(x > 0) & (x < element.max)]
    assert torch.equal(
        enumerated(points_of(element).float(), element).double(), points_of(element).view(-1, 1).expand(-1, 256)
    )
    assert len(beside) > 6 * (element.max_code - 1)


FLOATS = st.one_of(
    st.floats(width=32),
    st.floats(-8, 8, width=32),
    st.builds(lambda m, e: float(np.float32(m * 2.0**e)), st.integers(-(2**24), 2**24), st.integers(-45, -6)),
)


@SETTINGS
@given(x=FLOATS, byte=st.integers(0, 255), element=st.sampled_from(ELEMENTS))
def test_stochastic_rounding_is_its_scalar_twin(x: float, byte: int, element: Format) -> None:
    found = encode(stochastic(torch.tensor([x]), element, torch.tensor([byte], dtype=torch.uint8)), element)
    assert found.item() == scalar_rounding.stochastic(x, byte, element)


@ELEMENT
def test_gfloat_rounds_so_too(element: Format) -> None:
    """`StochasticFastest` adds the bits to the exact distance; for these numbers the sum is exact."""
    why = "gfloat is not installed: pip install gfloat"
    gfloat = pytest.importorskip("gfloat", reason=why)
    formats = pytest.importorskip("gfloat.formats", reason=why)
    theirs = getattr(formats, f"format_info_ocp_{element.name.lower()}")
    magnitudes = halves(element)[::3]
    magnitudes = magnitudes[magnitudes <= element.max]
    numbers = torch.cat([magnitudes, -magnitudes])
    x = numbers.unsqueeze(1).expand(-1, 256).double().numpy()
    each = np.broadcast_to(np.arange(256), x.shape)
    mode = gfloat.RoundMode.StochasticFastest
    rounded = gfloat.round_ndarray(theirs, x, mode, sat=True, srbits=each, srnumbits=8)
    np.testing.assert_array_equal(enumerated(numbers, element).numpy(), rounded)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [name for name in ALL if name.endswith("-sr")])
def test_a_stochastic_recipe_is_its_twin(name: str) -> None:
    recipe = find_recipe(name)
    x = matrix("ties", 6, 35, 70)
    given_words = words(6, 35, 70)
    q = quantize(x, name, random=given_words)
    each = philox.random_bytes(given_words.numpy().astype(np.int64) & 0xFFFFFFFF)
    codes, scales = mx.quantize(x.numpy(), recipe, random=each)
    np.testing.assert_array_equal(q.scales.numpy(), scales)
    np.testing.assert_array_equal(rowwise_elements(q).numpy(), codes)
    nearest = quantize(x, name.removesuffix("-sr"))
    assert torch.equal(q.scales, nearest.scales)
    assert not torch.equal(q.codes, nearest.codes)


def philox_words(seed: int, offset: int, rows: int, columns: int, first: int = 0) -> torch.Tensor:
    """Words (rows, ⌈columns/4⌉): block n of 32, the blocks counted from `first`, has subsequences 2n and 2n + 1."""
    made = philox.philox_words(seed, offset, rows, 32 * -(-columns // 32), first=2 * first)
    return torch.from_numpy(made.view(np.int32)[:, : -(-columns // 4)].copy())


@pytest.mark.parametrize("shape", [(1, 1), (3, 32), (5, 40), (2, 35), (4, 130)])
@pytest.mark.parametrize("name", ["mxfp8-e4m3-sr", "mxfp4-sr", "mxfp6-e2m3-2d-sr"])
def test_a_block_of_32_has_two_subsequences_of_philox(name: str, shape: tuple[int, int]) -> None:
    x = matrix("normal", 7, *shape)
    seed, offset = 0x1234_5678_9ABC_DEF0, 0xFEDC_BA98_7654_3210
    by_seed = quantize(x, name, random=(seed, offset))
    by_words = quantize(x, name, random=philox_words(seed, offset, *shape))
    assert torch.equal(by_seed.codes, by_words.codes)
    assert torch.equal(by_seed.scales, by_words.scales)


@pytest.mark.parametrize("name", ["mxfp8-e5m2-sr", "mxfp4-sr"])
def test_the_columnwise_half_draws_with_the_next_offset(name: str) -> None:
    x = matrix("normal", 8, 40, 70)
    row, column = quantize_both(x, name, random=(7, 8))
    assert row is not None
    assert column is not None
    for half, alone, offset in ((row, x, 8), (column, x.T.contiguous(), 9)):
        made = quantize(alone, name, random=philox_words(7, offset, *alone.shape))
        assert torch.equal(rowwise_elements(half), rowwise_elements(made))
