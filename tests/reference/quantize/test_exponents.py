"""Scales of E8M0: every rule against exact arithmetic, at every exponent and beside every threshold."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowgauge.reference.ops import quantize
from narrowgauge.reference.quantize.exponents import exponent_codes
from narrowgauge.spec.formats import Format
from narrowgauge.spec.recipes import find_recipe
from tests.reference import mx_exponents
from tests.reference.mx_exponents import DIALECTS, ELEMENTS, EMAX, NAMES

ELEMENT = pytest.mark.parametrize("element", ELEMENTS, ids=lambda fmt: fmt.name)
DIALECT = pytest.mark.parametrize("dialect", DIALECTS)
QUOTIENTS = ("te", "floor-448", "nearest")
# Mantissas at which a rule changes its result, √2 and its products with the mantissas of the largest elements.
THRESHOLDS = [1.0, 1.5, 1.75, 1.875, 1.9375, *(f * r for f in (1.0, 1.5, 1.75, 1.875) for r in (2**0.5, 2**-0.5))]


def amaxes() -> np.ndarray:
    """float32 numbers above 0: every exponent with every mantissa of bfloat16, and ± 3 ulp around every threshold.

    Every subnormal bfloat16 number, and float32 numbers at which a quotient becomes normal.
    """
    thresholds = (np.array(THRESHOLDS) * 2**23).astype(np.int64)
    near = (thresholds[:, None] + np.arange(-3, 5)).ravel()
    near = np.where(near < 1 << 23, 2 * near, near) & 0x7FFFFF
    mantissas = np.unique(np.concatenate([np.arange(128) << 16, near, [0x7FFFFF]]))
    bits = (np.arange(255)[:, None] << 23) + mantissas
    normal = np.array([float(Fraction(fmt.max) * Fraction(2) ** power) for fmt in ELEMENTS for power in (-127, -126)])
    edges = normal.astype(np.float32).view(np.int32)[:, None] + np.arange(-40, 41)
    found = np.concatenate([bits.ravel(), edges.ravel(), np.arange(64)]).astype(np.int32)
    return np.unique(found[found > 0]).view(np.float32)


def found_codes(amax: np.ndarray, element: Format, dialect: str) -> np.ndarray:
    recipe = find_recipe(f"{NAMES[element]}@{dialect}")
    return exponent_codes(torch.from_numpy(amax), recipe).numpy()


@DIALECT
@ELEMENT
def test_every_rule_is_exact_on_what_it_rounds(element: Format, dialect: str) -> None:
    x = amaxes()
    np.testing.assert_array_equal(found_codes(x, element, dialect), mx_exponents.codes(x, element, dialect))


@pytest.mark.parametrize("dialect", ["te", "floor-448"])
@ELEMENT
def test_a_rounded_quotient_has_the_exact_exponent(element: Format, dialect: str) -> None:
    """From 2^-126 on: docs/numerics.md#mx: equal to dividing by 448."""
    x = amaxes()
    x = x[x.astype(np.float64) >= element.max * 2.0**-126]
    np.testing.assert_array_equal(found_codes(x, element, dialect), mx_exponents.codes_of_quotient(x, element, dialect))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("dialect", QUOTIENTS)
@ELEMENT
def test_and_so_at_all_mantissas_of_an_exponent(element: Format, dialect: str) -> None:
    """Exception of `nearest`: the quotient by 7 just above √½ rounds to a number below √½."""
    x = (np.arange(1 << 23, dtype=np.int32) + (130 << 23)).view(np.float32)
    differ = np.nonzero(found_codes(x, element, dialect) != mx_exponents.codes_of_quotient(x, element, dialect))[0]
    sevenths = element.max == 1.75 * 2.0 ** EMAX[element]
    assert differ.tolist() == ([0x1E6455] if dialect == "nearest" and sevenths else [])


@ELEMENT
def test_a_subnormal_quotient_is_rounded_before_it_is_rounded_up(element: Format) -> None:
    """docs/numerics.md#mx, exponent 0 with mantissa ≤ 0x400000 stays 0: just above max·2^-127 the product is 2^-127."""
    edge = np.float32(element.max * 2.0**-127)
    above = np.nextafter(edge, np.float32(1))
    far = np.float32(element.max * 2.0**-127 * (1 + 2.0**-20))
    assert found_codes(np.array([edge, above, far]), element, "te").tolist() == [0, 0, 1]
    assert mx_exponents.codes_of_quotient(np.array([above]), element, "te") == 1


@DIALECT
@ELEMENT
def test_zero_infinity_and_nan_have_the_codes_that_the_bits_give(element: Format, dialect: str) -> None:
    special = np.array([0.0, math.inf, math.nan], np.float32)
    largest = 254 if dialect in QUOTIENTS else 255 - EMAX[element]
    assert found_codes(special, element, dialect).tolist() == [0, largest, 255]


@ELEMENT
def test_the_rules_that_saturate_and_those_that_never_do(element: Format) -> None:
    """No scaled element of te exceeds the largest number; elements of ocp do if the exponent of te is larger by 1."""
    x = amaxes()
    x = x[(x > 2.0**-100) & (x < 2.0**120)]
    te, ocp = (found_codes(x, element, dialect).astype(int) for dialect in ("te", "ocp"))
    exact = x.astype(np.float64)
    assert (exact <= element.max * 2.0 ** (te - 127)).all()
    clips = exact > element.max * 2.0 ** (ocp - 127)
    np.testing.assert_array_equal(clips, te - ocp == 1)
    np.testing.assert_array_equal(~clips, te == ocp)
    assert clips.any()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_pair_of_dialects_parts_on_some_amax(dialect: str) -> None:
    """But `even` and `compressed-tensors` on E2M1, whose single bit of mantissa carries at 1.75, and on E2M3."""
    twins = {"even": ["compressed-tensors"], "compressed-tensors": ["even"]}
    for element in ELEMENTS:
        mine = found_codes(amaxes(), element, dialect)
        others = [other for other in DIALECTS if other != dialect]
        same = [other for other in others if (mine == found_codes(amaxes(), element, other)).all()]
        assert same == (twins.get(dialect, []) if element.name in ("E2M1", "E2M3") else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_stores_the_codes_of_its_blocks(dtype: torch.dtype) -> None:
    """Every positive number of a 16-bit dtype as the amax of a block, beside a NaN and a smaller number."""
    x = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16)
    x = x.view(torch.bfloat16 if dtype is torch.float32 else dtype)
    x = x[x.isfinite()].to(dtype)
    blocks = torch.zeros(len(x), 32, dtype=dtype)
    blocks[:, 3], blocks[:, 17], blocks[:, 31] = -x, x / 2, math.nan
    for element in ELEMENTS:
        expected = mx_exponents.codes(x.float().numpy(), element, "te")
        np.testing.assert_array_equal(quantize(blocks, NAMES[element]).scales[:, 0], expected)
