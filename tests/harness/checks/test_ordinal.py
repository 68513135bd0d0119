"""Ordinals: integers in the order of values, neighbours one apart. Whole value sets, never a sample, up to 16 bits."""

import math
from itertools import pairwise

import pytest
import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.spec.formats import E4M3, E5M2, FORMATS

SIXTEEN = [torch.bfloat16, torch.float16]
ALL_WORDS = torch.arange(-(2**15), 2**15).to(torch.int16)


def assert_ordered(values: list[float], ordinals: list[int]) -> None:
    """Equal values have equal ordinals, and each next larger value the next integer."""
    pairs = sorted((value, number) for value, number in zip(values, ordinals, strict=True) if not math.isnan(value))
    for (low, first), (high, second) in pairwise(pairs):
        assert second - first == (low != high), (low, high)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_codes_are_numbered_in_the_order_of_their_values(fmt):
    codes = torch.arange(fmt.codes, dtype=torch.uint8)
    assert_ordered(list(fmt.values), ordinal.code_ordinals(codes, fmt).tolist())


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["E4M3", "E5M2"])
def test_codes_of_nan_lie_beyond_every_number(fmt):
    codes = torch.arange(fmt.codes, dtype=torch.uint8)
    ordinals = ordinal.code_ordinals(codes, fmt).abs().tolist()
    numbers = [n for n, value in zip(ordinals, fmt.values, strict=True) if not math.isnan(value)]
    nans = [n for n, value in zip(ordinals, fmt.values, strict=True) if math.isnan(value)]
    assert nans
    assert min(nans) > max(numbers)


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_all_16_bit_floats_are_numbered_in_order(dtype):
    x = ALL_WORDS.view(dtype)
    assert_ordered(x.double().tolist(), ordinal.float_ordinals(x).tolist())


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_nan_lies_beyond_infinity_on_its_own_side(dtype):
    x = ALL_WORDS.view(dtype)
    ordinals, infinity = ordinal.float_ordinals(x), int(ordinal.float_ordinals(torch.tensor([torch.inf], dtype=dtype)))
    assert torch.equal(ordinals.abs() > infinity, x.isnan())
    assert torch.equal(ordinals < 0, x.signbit() & (x != 0))


def test_float32_neighbours_are_one_apart_in_every_binade():
    x = torch.cat([torch.ldexp(torch.tensor([1.0, 1.3]), torch.tensor(e)) for e in range(-149, 128)])
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0])])
    for toward in (torch.inf, -torch.inf):
        step = torch.nextafter(x, torch.full_like(x, toward))
        expected = torch.full(x.shape, 1 if toward > 0 else -1)
        assert torch.equal(ordinal.float_ordinals(step) - ordinal.float_ordinals(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_both_zeros_are_0_and_a_distance_across_them_is_a_sum(dtype):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = torch.tensor([-smallest, -0.0, 0.0, smallest], dtype=dtype)
    assert ordinal.float_ordinals(x).tolist() == [-1, 0, 0, 1]
