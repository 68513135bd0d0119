"""The Hadamard transform: its matrix, its declared order against exact sums, that two cancel, errors."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowgauge.reference.ops import transform
from narrowgauge.reference.quantize.hadamard import signs
from narrowgauge.reference.scalar import hadamard, rounding
from narrowgauge.spec.recipes import RHT_GROUPS, Hadamard, find_recipe
from tests.golden import bits
from tests.reference.samples import MATRICES, matrix
from tests.reference.twins import rotated

EVERY = pytest.mark.parametrize("group", RHT_GROUPS)
U = Fraction(1, 1 << 24)


def name(group: int, *, signs: bool = True) -> str:
    return f"nvfp4-rht{'' if group == 16 else group}{'' if signs else '-nosign'}"


def exact(x: torch.Tensor, group: int) -> np.ndarray:
    """x·R of every group as fractions (object array): sums of whole numbers, which are faster, times unit and c."""
    c = hadamard.coefficient(group)
    units = np.array([[int(v * 2.0**133) for v in row] for row in x.double().tolist()], object)
    ones = np.array([[int(entry / c) for entry in row] for row in hadamard.rotation(group)], object)
    return (units.reshape(-1, group) @ ones).reshape(units.shape) * (c / (1 << 133))


@EVERY
@pytest.mark.parametrize("signed", [True, False])
def test_the_unit_matrix_becomes_r(group: int, signed: bool) -> None:
    found = transform(torch.eye(group).bfloat16(), name(group, signs=signed)).double().tolist()
    assert found == hadamard.rotation(group, signs=signed)


@EVERY
@pytest.mark.parametrize("signed", [True, False])
def test_r_is_orthogonal_but_for_its_factor(group: int, signed: bool) -> None:
    """R·Rᵀ = group·c²·I exactly: I where the group is a power of 4, else 1/√2 is off in bfloat16."""
    c = hadamard.coefficient(group)
    r = np.array([[int(entry / c) for entry in row] for row in hadamard.rotation(group, signs=signed)])
    assert (np.abs(r) == 1).all()
    for product in (r @ r.T, r.T @ r):
        np.testing.assert_array_equal(product, group * np.eye(group, dtype=int))
    assert (group * c * c == 1) == (math.isqrt(group) ** 2 == group)


def test_c_is_one_over_the_root_rounded_to_bfloat16() -> None:
    """Neither neighbour of c is as near: c² and 1/group on the two sides of the midpoints' squares."""
    for group in RHT_GROUPS:
        c = hadamard.coefficient(group)
        ulp = Fraction(2) ** (math.frexp(float(c))[1] - 8)
        below = ulp / 2 if math.frexp(float(c))[0] == 0.5 else ulp
        assert (c - below / 2) ** 2 < Fraction(1, group) < (c + ulp / 2) ** 2
        assert Fraction(torch.tensor(float(c)).bfloat16().item()) == c


def test_the_mask_0xd7e8_is_the_listed_signs() -> None:
    assert find_recipe("nvfp4-rht").transform == Hadamard(16, 0xD7E8)
    assert signs(Hadamard()).tolist() == hadamard.SIGNS
    assert sum(1 << k for k, sign in enumerate(hadamard.SIGNS) if sign < 0) == 0xD7E8
    assert signs(Hadamard(16, 0)).tolist() == [1.0] * 16
    assert find_recipe("nvfp4-rht-nosign").transform == Hadamard(16, 0)


@EVERY
@pytest.mark.parametrize("family", MATRICES)
@pytest.mark.parametrize("signed", [True, False])
def test_it_is_its_scalar_twin_in_the_declared_order(group: int, family: str, signed: bool) -> None:
    x = matrix(family, group, 3, 2 * group).bfloat16()
    found, expected = transform(x, name(group, signs=signed)), torch.from_numpy(rotated(x, group, signs=signed))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(bits(found)[~found.isnan()], bits(expected.bfloat16())[~expected.isnan()])


@pytest.mark.sampled(3)
@EVERY
def test_of_randn_it_is_the_exact_sum_rounded_once(group: int) -> None:
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(group)).bfloat16()
    expected = [[rounding.nearest(y, "bfloat16") for y in row] for row in exact(x, group)]
    assert transform(x, name(group)).tolist() == expected


@pytest.mark.sampled(4)
@EVERY
def test_spread_exponents_lie_within_the_rounding_error(group: int) -> None:
    """Exponents over 2^±30. log2(group) additions on every path round by at most u; then follows a single rounding."""
    x = matrix("spread", group, 24, 128).bfloat16()
    sums = exact(x, group)
    sizes = [[sum(map(Fraction, part)) for part in row] for row in x.double().abs().view(24, -1, group).tolist()]
    most = ((1 + U) ** (group.bit_length() - 1) - 1) * hadamard.coefficient(group)
    found = transform(x, name(group)).tolist()
    for i, k in np.ndindex(sums.shape):
        error = most * sizes[i][k // group]
        low, high = (rounding.nearest(sums[i, k] + side * error, "bfloat16") for side in (-1, 1))
        assert low <= found[i][k] <= high


@pytest.mark.parametrize("group", RHT_GROUPS[1:])
def test_far_exponents_round_more_than_once(group: int) -> None:
    """1 + 2^-30 is 1 in float32, and 1 + 2^-30 − 1 is 0."""
    x = torch.zeros(1, group)
    x[0, :3] = torch.tensor([1.0, 2.0**-30, -1.0])
    once = rounding.nearest(sum(Fraction(v) for v in x[0].tolist()) * hadamard.coefficient(group), "bfloat16")
    assert once == float(hadamard.coefficient(group)) * 2.0**-30
    assert transform(x.bfloat16(), name(group, signs=False))[0, 0] == 0.0


def test_two_elements_can_round_twice() -> None:
    """A sum, found by search, that float32 rounds to a tie of bfloat16."""
    x = torch.tensor([[134.0, 181 * 2.0**-14]])
    total = sum(Fraction(v) for v in x[0].tolist()) * hadamard.coefficient(2)
    twice = rounding.nearest(Fraction(rounding.nearest(total, "float32")), "bfloat16")
    assert twice != rounding.nearest(total, "bfloat16")
    assert transform(x.bfloat16(), name(2, signs=False))[0, 0] == twice


@EVERY
def test_two_rotations_cancel_in_exact_arithmetic(group: int) -> None:
    """(a·R)·(b·R)ᵀ = group·c²·a·bᵀ: what lets both operands of a product be rotated."""
    generator = torch.Generator().manual_seed(group)
    a, b = (torch.randn(rows, 2 * group, generator=generator).bfloat16() for rows in (2, 3))
    plain = [[[Fraction(v) for v in row] for row in x.double().tolist()] for x in (a, b)]
    product = np.array(plain[0], object) @ np.array(plain[1], object).T
    turned = exact(a, group) @ exact(b, group).T
    assert (turned == group * hadamard.coefficient(group) ** 2 * product).all()


@EVERY
def test_a_group_is_rotated_by_itself(group: int) -> None:
    x = matrix("normal", 1, 4, 3 * group).bfloat16()
    whole = transform(x, name(group))
    for start in range(0, 3 * group, group):
        assert torch.equal(transform(x[:, start : start + group], name(group)), whole[:, start : start + group])
    x[1, group] = math.inf
    x[2, group + 1] = math.nan
    dirty = transform(x, name(group))
    inside = slice(group, 2 * group)
    assert not dirty[1, inside].isfinite().any()
    assert dirty[2, inside].isnan().all()
    others = torch.ones_like(x, dtype=torch.bool)
    others[1:3, inside] = False
    assert torch.equal(dirty[others], whole[others])
