"""Rule 1: byte for byte. Differing elements, equal elements, and distances."""

import math

import pytest
import torch

from narrowgauge.harness.checks import exact
from narrowgauge.spec.formats import E2M1, E4M3

DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def at(row, column):
    return {"at": (row, column)}


def floats(actual, expected):
    return exact.exact_floats("values", actual, expected, noun="values", describe=at)


def codes(actual, expected, fmt=E4M3):
    return exact.exact_codes("codes", actual, expected, fmt, noun="codes", describe=at)


def one_of(value: float, dtype: torch.dtype) -> torch.Tensor:
    """Ones (2, 3) with `value` at row 1, column 2."""
    x = torch.ones(2, 3, dtype=dtype)
    x[1, 2] = value
    return x


@every_dtype
def test_the_same_bytes_are_right(dtype):
    x = torch.tensor([[0.0, -0.0, torch.inf], [-torch.inf, torch.nan, 1.0]], dtype=dtype)
    result = floats(x.clone(), x)
    assert result.passed
    assert (result.rule, result.compared, result.mismatches, result.max_ulp) == ("exact", 6, 0, None)
    assert result.finding is None


@every_dtype
@pytest.mark.parametrize(("actual", "expected"), [(torch.nan, 1.0), (1.0, torch.nan), (torch.inf, torch.nan)])
def test_nan_and_a_number_differ_both_ways(dtype, actual, expected):
    result = floats(one_of(actual, dtype), one_of(expected, dtype))
    assert not result.passed
    assert (result.compared, result.mismatches) == (6, 1)
    assert result.max_ulp > 0
    words = "a number where NaN is expected" if math.isnan(expected) else "NaN where a number is expected"
    assert result.finding["elements"] == [{"which": "first", "at": (1, 2), "distance": words}]


@every_dtype
def test_nan_equals_nan_of_any_payload_and_sign(dtype):
    integer = DTYPES[dtype]
    quiet = one_of(torch.nan, dtype)
    other = quiet.view(integer).clone()
    other[1, 2] = -1  # every bit set
    assert not torch.equal(other, quiet.view(integer))
    assert floats(other.view(dtype), quiet).passed
    assert floats(quiet, other.view(dtype)).passed


@every_dtype
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_other_zero_differs_by_no_step(dtype, sign):
    result = floats(one_of(-0.0 * sign, dtype), one_of(0.0 * sign, dtype))
    assert result.sentence == "1 of 6 values differ, each the other zero, at row 1, column 2"
    assert (result.mismatches, result.max_ulp) == (1, 0)
    assert result.finding["elements"] == [{"which": "first", "at": (1, 2), "distance": "the other zero"}]


@pytest.mark.parametrize("fmt", [E2M1, E4M3], ids=["E2M1", "E4M3"])
def test_every_code_and_the_next_are_one_step_apart(fmt):
    positive = torch.arange(fmt.codes // 2, dtype=torch.uint8)
    for sign in (0, fmt.sign_code):
        result = codes((positive[1:] | sign).view(1, -1), (positive[:-1] | sign).view(1, -1), fmt)
        assert result.mismatches == fmt.codes // 2 - 1
        nan = " 1 NaN where a number is expected, 126 by 1 step;" if fmt is E4M3 else ", each by 1 step,"
        said = result.sentence.replace("differ:", "differ")
        assert said.startswith(f"{result.mismatches} of {result.compared} codes differ{nan}")


def test_the_sentence_says_how_many_how_far_and_where():
    expected = torch.full((1024, 1024), 3, dtype=torch.uint8)
    actual = expected.clone()
    rows = torch.arange(37)
    actual[rows, 16 * rows + 15] = 4
    result = codes(actual, expected, E2M1)
    assert result.sentence == "37 of 1 048 576 codes differ, each by 1 step, all at column 15 modulo 16"
    assert (result.compared, result.mismatches, result.max_ulp) == (1 << 20, 37, 1)
    assert result.entry() == {
        "stage": "codes", "rule": "exact", "compared": 1 << 20, "mismatches": 37, "max_ulp": 1,
        "excused": 0, "unbounded": None, "sentence": result.sentence,
    }  # fmt: skip
