"""4over6: witnesses of every choice in it, the order of every sum included. Its scalar twin is in test_variants.py."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowgauge.reference.ops import dequantize, quantize
from narrowgauge.reference.scalar import nvfp4
from narrowgauge.reference.scalar import rounding as scalar_rounding
from narrowgauge.reference.scalar.rounding import f32
from narrowgauge.spec.formats import E2M1, E4M3
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import recipe_names
from tests.reference.twins import elements

NAMES = [name for name in recipe_names() if "4over6" in name and "@" not in name]
SCALE_6, SCALE_4 = 0x38, 0x3C  # 1 and 1.5: what a block amax of 6 maps to 6 and to 4 by, under S_enc = 1


def block(*numbers: float) -> torch.Tensor:
    return torch.tensor([[*numbers, *[0.0] * (16 - len(numbers))]])


def chosen(x: torch.Tensor, name: str) -> Quantized:
    """`x` under S_enc = 1: all the arithmetic before the sum of errors is exact for short fractions."""
    return quantize(
        x, name, amax=torch.full((x.shape[0] if "row" in name else 1,), 2688.0 if "448" in name else 1536.0)
    )


@pytest.mark.parametrize("name", NAMES)
def test_4_wins_where_it_brings_elements_nearer(name: str) -> None:
    q = chosen(block(6.0, 4.5, -4.5), name)
    assert q.scales.tolist() == [[SCALE_4]]
    assert elements(q)[0, :4].tolist() == [6, 5, 13, 0]
    assert dequantize(q)[0, :4].tolist() == [6.0, 4.5, -4.5, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_6_wins_where_4_is_further(name: str) -> None:
    q = chosen(block(6.0, 4.0, -3.0), name)
    assert q.scales.tolist() == [[SCALE_6]]
    assert elements(q)[0, :4].tolist() == [7, 6, 13, 0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numbers", [(6.0, -6.0), (6.0, 4.5, 4.0), (0.0, 0.0)])
def test_a_tie_goes_to_6(name: str, numbers: tuple[float, ...]) -> None:
    """No error under both scales; an error of ½ under both; a block of zeros."""
    q = chosen(block(*numbers), name)
    assert q.scales.tolist() == [[SCALE_6 if any(numbers) else 0]]


@pytest.mark.parametrize("kind", ["", "-2d", "-rowscaled"])
@pytest.mark.parametrize("most", [448, 256])
def test_absolute_and_squared_errors_choose_differently(kind: str, most: int) -> None:
    """Under 6 the error of the 5 is 1; under 4 its error is ½, and ¼ for each 2: 1 < 5/4, but 1 > 7/16."""
    x = block(6.0, 5.0, 2.0, 2.0, 2.0)
    assert chosen(x, f"nvfp4{kind}-4over6-{most}-mae").scales.tolist() == [[SCALE_6]]
    assert chosen(x, f"nvfp4{kind}-4over6-{most}-mse").scales.tolist() == [[SCALE_4]]


@pytest.mark.parametrize("kind", ["", "-2d", "-rowscaled"])
@pytest.mark.parametrize("error", ["mae", "mse"])
def test_448_has_no_room_for_4_in_the_largest_block_and_256_has(kind: str, error: str) -> None:
    x = block(6.0, 4.5)
    q = quantize(x, f"nvfp4{kind}-4over6-448-{error}")
    assert (q.scales.tolist(), q.tensor_scale) == ([[0x7E]], torch.tensor([448.0]))
    q = quantize(x, f"nvfp4{kind}-4over6-256-{error}")
    assert (q.scales.tolist(), q.tensor_scale) == ([[0x7C]], torch.tensor([256.0]))  # E4M3 of 384
    assert dequantize(q)[0, :2].tolist() == [6.0, 4.5]


@pytest.mark.parametrize("name", NAMES)
def test_each_block_chooses_for_itself_but_a_tile_as_one(name: str) -> None:
    """Nine rows gain by 4, and seven rows lose as much: in 2-D the sum of the nine is larger."""
    rows = [block(6.0, 4.5) if i < 9 else block(6.0, 4.0) for i in range(16)]
    x = torch.cat([torch.cat(rows), torch.cat(rows[::-1])], dim=1)
    scales = chosen(x, name).scales
    if "-2d" in name:
        assert (scales == SCALE_4).all()
        assert (chosen(torch.cat([rows[0], *rows[9:]]), name).scales == SCALE_6).all()
    else:
        assert scales[:, 0].tolist() == [SCALE_4] * 9 + [SCALE_6] * 7
        assert scales[:, 1].tolist() == [SCALE_6] * 7 + [SCALE_4] * 9


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NAMES)
def test_every_element_of_a_block_is_counted(name: str) -> None:
    """4.5 at any place is a gain for 4; with a 4 at a second place the errors tie."""
    for one in range(1, 16):
        x = block(6.0)
        x[0, one] = 4.5
        assert chosen(x, name).scales.tolist() == [[SCALE_4]]
        for other in {*range(1, 16)} - {one}:
            y = x.clone()
            y[0, other] = -4.0
            assert chosen(y, name).scales.tolist() == [[SCALE_6]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in NAMES if "-2d" in name])
def test_every_row_of_a_tile_is_counted(name: str) -> None:
    for one, other in itertools.permutations(range(16), 2):
        x = torch.zeros(16, 16)
        x[:, 0] = 6.0
        x[one, 3] = 4.5
        assert (chosen(x, name).scales == SCALE_4).all()
        x[other, 9] = 4.0
        assert (chosen(x, name).scales == SCALE_6).all()


# Roundings. Blocks, found by search, with two errors that differ by a rounding under amax 300, E = 448.

ORDER_OF_ELEMENTS = [
    6.0, 4.504636764526367, -3.558403968811035, 4.486494541168213, -1.881685495376587, -0.7667354941368103,
    3.2770259380340576, -0.9080086350440979, 0.49593687057495117, -4.724409103393555, 2.5351309776306152,
    0.3814331293106079, -1.7026828527450562, 2.884287118911743, -1.9680516719818115, 0.2663191556930542,
]  # fmt: skip
NO_FMA = [
    6.0, 3.972137928009033, 2.756856918334961, -2.7479281425476074, -1.9983371496200562, 3.735534429550171,
    -4.947347164154053, 3.2122840881347656, 2.9706943035125732, -0.32065045833587646, -1.9696757793426514,
    -2.2157437801361084, -2.4513041973114014, -0.5492369532585144, 0.04548259079456329, 0.301177442073822,
]  # fmt: skip
TREE_OF_ROWS = [
    [6.0, 4.290263652801514, -3.223074197769165, 1.088516116142273],
    [2.048647403717041, 4.428036689758301, 1.6565741300582886, -3.6660423278808594],
    [-0.02132401242852211, -0.06380166113376617, 0.002261893590912223, 4.585823059082031],
    [-1.5006259679794312, -2.7622885704040527, 0.2208700180053711, 1.411709189414978],
    [4.391070365905762, 0.8201580047607422, -2.3216660022735596, 4.2977471351623535],
    [-0.08274715393781662, 1.758008599281311, -0.23961089551448822, -2.830199718475342],
    [1.925520420074463, 2.7063047885894775, -3.0921149253845215, -0.4008398652076721],
    [-1.3818494081497192, -3.2927017211914062, -2.7864832878112793, 4.6250739097595215],
    [3.8422305583953857, -1.1770817041397095, 2.3947324752807617, -4.580319404602051],
    [4.150571823120117, 0.3717085123062134, 3.2026779651641846, -2.240617513656616],
    [-1.2387619018554688, -1.519562840461731, 4.724396705627441, -0.7054011821746826],
    [-0.0030725947581231594, 4.559789180755615, 4.031955718994141, -1.04989492893219],
    [-1.92642080783844, 3.070479393005371, -3.9252841472625732, -1.0781108140945435],
    [3.764338254928589, 4.176424026489258, -2.6652374267578125, -4.212798595428467],
    [2.877274990081787, 1.2177807092666626, -2.6249518394470215, 0.05893194302916527],
    [-4.285817623138428, 2.00087308883667, 0.2672545611858368, 0.264336496591568],
]
AMAX = torch.tensor([300.0])


def candidates(x: np.ndarray) -> list[int]:
    """The scale of 4 and the scale of 6."""
    base = nvfp4.unrounded_scale(scalar_rounding.largest(x.ravel()), nvfp4.tensor_scale(f32(300)), "(amax/6)*enc")
    return [scalar_rounding.encode(float(base * f32(1.5)), E4M3), scalar_rounding.encode(float(base), E4M3)]


def differences(x: np.ndarray, stored: int) -> list[f32]:
    """The error of each element, with its sign."""
    factor = nvfp4.element_factor(stored, nvfp4.tensor_scale(f32(300)))
    values = [f32(E2M1.value(scalar_rounding.encode(float(v * factor), E2M1))) for v in x]
    scale = f32(E4M3.value(stored))
    return [value * scale * f32(300) / f32(2688) - v for value, v in zip(values, x, strict=True)]


def in_order(terms: list[f32]) -> f32:
    total = f32(0)
    for term in terms:
        total = total + term
    return total


def in_a_tree(terms: list[f32]) -> f32:
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [one + other for one, other in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def fused(errors: list[f32]) -> f32:
    total = f32(0)
    for error in errors:
        total = f32(scalar_rounding.nearest(Fraction(float(error)) ** 2 + Fraction(float(total)), "float32"))
    return total


def test_errors_of_a_block_are_added_in_order() -> None:
    x = np.array(ORDER_OF_ELEMENTS, f32)
    four, six = candidates(x)
    errors = [[abs(e) for e in differences(x, stored)] for stored in (four, six)]
    assert in_a_tree(errors[0]) < in_a_tree(errors[1]), "another order would choose 4"
    assert not in_order(errors[0]) < in_order(errors[1])
    assert quantize(torch.from_numpy(x)[None], "nvfp4-4over6-448-mae", amax=AMAX).scales.tolist() == [[six]]


def test_squares_are_rounded_before_they_are_added() -> None:
    x = np.array(NO_FMA, f32)
    four, six = candidates(x)
    errors = [differences(x, stored) for stored in (four, six)]
    assert fused(errors[0]) < fused(errors[1]), "a fused multiply-add would choose 4"
    squares = [[e * e for e in some] for some in errors]
    assert not in_order(squares[0]) < in_order(squares[1])
    assert quantize(torch.from_numpy(x)[None], "nvfp4-4over6-448-mse", amax=AMAX).scales.tolist() == [[six]]


def test_the_rows_of_a_tile_are_added_in_a_tree() -> None:
    x = np.zeros((16, 16), f32)
    x[:, :4] = TREE_OF_ROWS
    four, six = candidates(x)
    errors = [[in_order([abs(e) for e in differences(row, stored)]) for row in x] for stored in (four, six)]
    assert in_order(errors[0]) < in_order(errors[1]), "one row after the other would choose 4"
    assert not in_a_tree(errors[0]) < in_a_tree(errors[1])
    assert (quantize(torch.from_numpy(x), "nvfp4-2d-4over6-448-mae", amax=AMAX).scales == six).all()
