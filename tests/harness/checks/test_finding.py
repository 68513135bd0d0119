"""Findings: the sentence, the elements shown, the counts, the heat map."""

import math

import pytest
import torch

from narrowgauge.harness.checks.distance import Comparison, measure
from narrowgauge.harness.checks.exact import exact_codes, exact_floats
from narrowgauge.harness.checks.finding import census, float_view, histogram, make_finding, sentence
from narrowgauge.spec.formats import E2M1, E2M3, E4M3, E5M2, E8M0


def wrong_at(shape, *places):
    wrong = torch.zeros(shape, dtype=torch.bool)
    for place in places:
        wrong[place] = True
    return wrong


def said(wrong, distance=None):
    distance = torch.ones(wrong.shape, dtype=torch.int64) if distance is None else distance
    return sentence(wrong, measure(wrong, distance, None), "codes")


def found(wrong, distance=None):
    distance = torch.ones(wrong.shape, dtype=torch.int64) if distance is None else distance
    distances = measure(wrong, distance.masked_fill(~wrong, -1), None)
    return make_finding("codes", "exact", "a sentence", wrong, distances, describe=place)


def place(row, column):
    return {"row": row, "column": column}


@pytest.mark.parametrize(
    ("places", "where"),
    [
        ([(3, 5)], "at row 3, column 5"),
        ([(3, 5), (3, 6), (3, 40)], "all in row 3"),
        ([(3, 5), (4, 5), (40, 5)], "all in column 5"),
        ([(1, 3), (17, 5), (33, 60), (49, 7), (65, 9)], "all at row 1 modulo 16"),
        ([(1, 3), (17, 5), (33, 60), (49, 7)], "the first at row 1, column 3"),  # chance: 1 of 4096, and six moduli
        ([(1, 15), (2, 31), (5, 47), (7, 63), (9, 79)], "all at column 15 modulo 16"),
        ([(1, 3), (2, 4)], "the first at row 1, column 3"),
        ([(0, 95), (1, 0)], "the first at row 0, column 95"),
    ],
)
def test_where(places, where):
    wrong = wrong_at((96, 96), *places)
    assert said(wrong).endswith(f" of 9 216 codes differ, each by 1 step, {where}")


def test_the_smallest_modulus_that_holds_is_named():
    columns = [(row, 3 + 32 * row) for row in range(5)]
    assert said(wrong_at((300, 512), *columns)).endswith(", all at column 3 modulo 16")
    rows = [(32 * column, column) for column in range(5)]
    assert said(wrong_at((300, 512), *rows)).endswith(", all at row 0 modulo 16")


@pytest.mark.parametrize(
    ("low", "high", "how_far"),
    [
        (0, 0, "each the other zero"),
        (1, 1, "each by 1 step"),
        (3, 3, "each by 3 steps"),
        (0, 1, "by up to 1 step"),
        (2, 12345, "by up to 12 345 steps"),
    ],
)
def test_how_far(low, high, how_far):
    wrong = wrong_at((4, 4), (0, 0), (1, 1))
    distance = torch.full((4, 4), 77777)  # of right elements, which do not count
    distance[0, 0], distance[1, 1] = low, high
    assert said(wrong, distance) == f"2 of 16 codes differ, {how_far}, the first at row 0, column 0"


def test_first_and_worst():
    wrong = wrong_at((4, 64), (1, 40), (2, 3), (3, 3))
    distance = torch.zeros(4, 64, dtype=torch.int64)
    distance[1, 40], distance[2, 3], distance[3, 3] = 2, 9, 9
    assert found(wrong, distance)["elements"] == [
        {"which": "first", "row": 1, "column": 40, "distance": "2 steps"},
        {"which": "worst", "row": 2, "column": 3, "distance": "9 steps"},
    ]


FLOATS = {
    "step": (1.0, 1.0078125), "half": (1.0, 0.5), "above": (4.0, 4.0 * 2**20), "from 0": (0.0, 3.5),
    "sign": (2.0, -2.0), "nan": (1.0, math.nan), "no nan": (math.nan, 1.0), "inf": (-1.0, math.inf),
    "no inf": (math.inf, 3.0), "zero": (0.0, -0.0),
}  # fmt: skip
"""Expected and actual number of an element, bfloat16."""


def floats(*names):
    expected, actual = torch.tensor([FLOATS[name] for name in names], dtype=torch.bfloat16).T.unsqueeze(1)
    return exact_floats("output", actual, expected, noun="outputs", describe=place)


@pytest.mark.parametrize(
    ("names", "how_far"),
    [
        (["step", "step"], ", each by 1 step, "),
        (["half", "half"], ", each by 50 % of the expected value, "),
        (["step", "half"], ", by up to 50 % of the expected value, "),
        (["half", "above"], ", by up to 1.05e+06 times the expected value, "),
        (["zero", "zero"], ", each the other zero, "),
        (["from 0", "from 0"], ", each not 0 where 0 is expected, "),
        (["sign", "sign"], ", each with the other sign, "),
        (["nan", "nan"], ", each NaN where a number is expected, "),
        (["no nan", "no nan"], ", each a number where NaN is expected, "),
        (["inf", "inf"], ", each infinite where a finite number is expected, "),
        (["no inf", "no inf"], ", each finite where infinity is expected, "),
        (["nan", "sign", "nan"], ": 1 with the other sign, 2 NaN where a number is expected; "),
        (["nan", "step", "step"], ": 1 NaN where a number is expected, 2 by 1 step; "),
        (["inf", "half", "step"], ": 1 infinite where a finite number is expected, 2 by up to 50 % of the expected "),
    ],
)
def test_far_elements_have_no_count_of_steps(names, how_far):
    result = floats(*names)
    assert result.sentence.startswith(f"{len(names)} of {len(names)} outputs differ{how_far}")


@pytest.mark.parametrize(
    ("names", "worst"),
    [
        (["step", "nan", "half", "inf", "sign"], (2, "50 % of the expected value")),
        (["nan", "step"], (1, "1 step")),
        (["inf", "sign", "nan"], (1, "other sign")),
        (["nan", "from 0", "sign"], (1, "not 0 where 0 is expected")),
    ],
)
def test_the_worst_element_is_an_ordinary_one(names, worst):
    first, last = floats(*names).finding["elements"]
    assert first["column"] == 0
    assert (last["column"], last["distance"]) == worst


def test_of_special_values_the_first_is_shown_alone():
    (only,) = floats("nan", "inf", "no nan").finding["elements"]
    assert only == {"which": "first", "row": 0, "column": 0, "distance": "NaN where a number is expected"}


def test_a_byte_above_the_codes_is_no_number():
    actual, expected = torch.tensor([[0x41, 3]], dtype=torch.uint8), torch.tensor([[1, 1]], dtype=torch.uint8)
    result = exact_codes("codes", actual, expected, E2M3, noun="codes", describe=place)
    assert result.sentence == "2 of 2 codes differ: 1 no code of the format, 1 by 2 steps; the first at row 0, column 0"


def test_counts_by_row_and_column():
    modulo = found(wrong_at((40, 20), (0, 3), (16, 3), (33, 19)))["modulo"]
    row, column = [0] * 16, [0] * 16
    row[0], row[1], column[3] = 2, 1, 3  # 19 is 3 modulo 16
    assert modulo["row"]["16"] == row
    assert modulo["column"]["16"] == column
    assert {name: {m: len(counts) for m, counts in axis.items()} for name, axis in modulo.items()} == {
        axis: {"16": 16, "32": 32, "128": 128} for axis in ("row", "column")
    }
    assert modulo["row"]["128"][33] == 1
    assert modulo["column"]["32"][19] == 1
    assert all(sum(counts) == 3 for axis in modulo.values() for counts in axis.values())


@pytest.mark.parametrize(
    ("shape", "tile", "tiles"),
    [
        ((1, 1), (1, 1), (1, 1)),
        ((40, 20), (2, 1), (20, 20)),
        ((512, 512), (16, 16), (32, 32)),
        ((513, 2048), (32, 64), (17, 32)),  # powers of two, so that mistakes in each block do not make bands
        ((16, 100_000), (1, 4096), (16, 25)),  # one row of tiles only for one row
    ],
)
def test_a_heat_map_has_at_most_32_tiles_a_side(shape, tile, tiles):
    wrong = wrong_at(shape, (0, 0), (-1, -1))
    heat = found(wrong)["heat"]
    assert (heat["rows"], heat["columns"]) == tile
    assert (len(heat["counts"]), len(heat["counts"][0])) == tiles
    assert sum(map(sum, heat["counts"])) == int(wrong.sum())
    assert heat["counts"][0][0] >= 1
    assert heat["counts"][-1][-1] >= 1


@pytest.mark.parametrize(
    ("value", "dtype", "seen"),
    [
        (-1.5, torch.bfloat16, (-1.5, "0xBFC0")),
        (1.0, torch.float16, (1.0, "0x3C00")),
        (1.0, torch.float32, (1.0, "0x3F800000")),
        (-0.0, torch.float32, (-0.0, "0x80000000")),
        (1.0, torch.float64, (1.0, "0x3FF0000000000000")),
        (math.inf, torch.float32, ("inf", "0x7F800000")),
        (-math.inf, torch.bfloat16, ("-inf", "0xFF80")),
        (math.nan, torch.float16, ("nan", "0x7E00")),
    ],
)
def test_a_number_is_seen_as_value_and_bits(value, dtype, seen):
    assert str(float_view(torch.tensor(value, dtype=dtype))) == str(seen)


def test_steps_of_codes_know_the_sign_and_skip_nan():
    expected, actual = torch.tensor([[0x0, 0x9, 0x7]]), torch.tensor([[0x8, 0x1, 0x6]])
    assert histogram(Comparison(expected.byte(), actual.byte(), E2M1)) == [[-1, -1, 1], [0, 0, 1], [1, 1, 0], [2, 2, 1]]
    nan = torch.tensor([[0x7F, 0x00]]).byte()
    assert histogram(Comparison(nan, torch.zeros_like(nan), E4M3)) == [[0, 0, 1]]
    assert histogram(Comparison(torch.tensor([[64]]).byte(), torch.zeros(1, 1).byte(), E2M3)) == []


@pytest.mark.parametrize(
    ("fmt", "codes", "counts"),
    [
        (E2M1, range(16), {"negative_zero": 1, "saturated": 2, "subnormal": 2}),
        (E4M3, range(256), {"nan": 2, "negative_zero": 1, "saturated": 2, "subnormal": 14}),
        (E5M2, range(256), {"nan": 6, "inf": 2, "negative_zero": 1, "saturated": 2, "subnormal": 6}),
        (E8M0, range(256), {"nan": 1, "saturated": 1}),
        (E2M3, range(256), {"negative_zero": 1, "saturated": 2, "subnormal": 14, "no_code": 192}),
    ],
)
def test_a_census_of_every_code(fmt, codes, counts):
    every = torch.tensor([list(codes)]).byte()
    assert census(Comparison(every, torch.full_like(every, 1 << fmt.mantissa_bits), fmt)) == {
        "expected": counts, "actual": dict.fromkeys(counts, 0),
    }  # fmt: skip


def test_a_finding_with_a_comparison_has_steps_and_census():
    expected, actual = torch.zeros(4, 4), torch.zeros(4, 4)
    actual[1, 2] = math.nan
    wrong = actual.isnan()
    plain = make_finding(
        "output",
        "exact",
        "a sentence",
        wrong,
        measure(wrong, wrong.long(), None),
        describe=lambda _, __: {},
        comparison=Comparison(expected, actual),
    )
    assert plain["steps"] == [[0, 0, 15]]
    assert plain["census"] == {"expected": {"nan": 0}, "actual": {"nan": 1}}
    without = found(wrong)
    assert (without["steps"], without["census"]) == ([], {})
