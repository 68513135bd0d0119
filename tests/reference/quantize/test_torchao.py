"""A third opinion on the MX formats: torchao's `to_mx`, with the dialects ocp, te, even and ceil as modes.

Known differences are asserted by name, so that a release with a change shows.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from narrowgauge.reference.ops import quantize
from narrowgauge.reference.quantize.layout import unpack
from narrowgauge.reference.scalar import rounding
from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format
from tests.reference import mx_exponents
from tests.reference.mx_exponents import ELEMENTS, NAMES
from tests.reference.quantize.test_exponents import amaxes
from tests.reference.samples import boundaries, matrix
from tests.reference.twins import rowwise_elements

MODES = {"ocp": "FLOOR", "te": "RCEIL", "even": "EVEN", "ceil": "CEIL"}
DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, E3M2: "fp6_e3m2", E2M3: "fp6_e2m3",
          E2M1: torch.float4_e2m1fn_x2}  # fmt: skip
ELEMENT = pytest.mark.parametrize("element", ELEMENTS, ids=lambda fmt: fmt.name)
MODE = pytest.mark.parametrize("dialect", MODES)


@pytest.fixture(scope="module")
def torchao() -> Any:
    why = "torchao is not installed, so MX is not compared with it: pip install torchao"
    pytest.importorskip("torchao", reason=why)
    return pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason=why)


def theirs(torchao: Any, x: torch.Tensor, element: Format, dialect: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale bytes and codes, one a byte, of `x` (M, K), float32 or bfloat16."""
    scales, codes = torchao.to_mx(
        x.contiguous(), DTYPES[element], 32, torchao.ScaleCalculationMode[MODES[dialect]]
    )  # fmt: skip
    codes = codes.view(torch.uint8)
    return scales.view(torch.uint8), unpack(codes, x.shape[1]) if element is E2M1 else codes


def ours(x: torch.Tensor, element: Format, dialect: str) -> tuple[torch.Tensor, torch.Tensor]:
    q = quantize(x, f"{NAMES[element]}@{dialect}")
    return q.scales, rowwise_elements(q)


def families(element: Format, dtype: torch.dtype) -> torch.Tensor:
    """Rows of 64 whose scales lie inside float32: randn, wide exponents, ties of the element, its boundaries, zeros."""
    near = torch.from_numpy(boundaries(element))
    near = near[near.abs() <= element.max]
    near = torch.nn.functional.pad(near, (0, -len(near) % 62)).view(-1, 62)
    near = torch.cat([torch.full((len(near), 1), element.max), near, torch.full((len(near), 1), element.max)], 1)
    parts = [
        matrix("normal", 1, 64, 64), matrix("spread", 2, 64, 64), matrix("ties", 3, 64, 64), near, near * 2.0**-60,
        near * 2.0**70, torch.zeros(1, 64), -torch.zeros(1, 64),
    ]  # fmt: skip
    return torch.cat(parts).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@MODE
@ELEMENT
def test_scales_and_codes_are_torchaos(torchao: Any, element: Format, dialect: str, dtype: torch.dtype) -> None:
    x = families(element, dtype)
    scales, codes = theirs(torchao, x, element, dialect)
    mine, elements = ours(x, element, dialect)
    assert torch.equal(mine, scales)
    assert torch.equal(elements, codes)


def blocks(dtype: torch.dtype) -> torch.Tensor:
    """A block for each amax of `amaxes`, with random smaller numbers."""
    amax = torch.from_numpy(amaxes()).to(dtype)
    amax = amax[amax.isfinite()].float().unique().to(dtype)
    x = (torch.rand(len(amax), 32, generator=torch.Generator().manual_seed(0)) * 2 - 1).to(dtype) * amax.unsqueeze(1)
    x[:, 5] = amax
    return x


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@MODE
@ELEMENT
def test_every_exponent_and_threshold_has_torchaos_scale(
    torchao: Any, element: Format, dialect: str, dtype: torch.dtype
) -> None:
    """Except float32 in RCEIL (next test), and codes of blocks with the scale 2^-127 (second test below)."""
    x = blocks(dtype)
    scales, codes = theirs(torchao, x, element, dialect)
    mine, elements = ours(x, element, dialect)
    differ = (mine != scales).flatten()
    assert not differ.any() or (dialect == "te" and dtype is torch.float32)
    same = ~differ & (mine != 0).flatten()
    assert torch.equal(elements[same], codes[same])


@ELEMENT
def test_rceil_is_one_too_small_just_above_a_largest_number(torchao: Any, element: Format) -> None:
    """torchao 0.18 rounds up log2 of float32, which is a whole number up to half its ulp above max·2^k.

    Then the largest element exceeds max·scale and is clipped, unlike with cvt.rp or in exact arithmetic.
    """
    x = blocks(torch.float32)
    amax = x[:, 5].double()
    scales, _ = theirs(torchao, x, element, "te")
    mine, _ = ours(x, element, "te")
    differ = (mine != scales).flatten()
    assert differ.sum() > 500
    assert (mine.int() - scales.int())[differ].eq(1).all()
    quotient = (x[:, 5] / element.max).double()
    power = quotient.log2().floor()
    half_ulp = (power.float().nextafter(torch.tensor(math.inf)).double() - power) / 2
    over = quotient.log2() - power
    assert torch.equal(differ, (over > 0) & (over <= half_ulp) & (quotient > 2.0**-127))
    held = [Fraction(a) <= Fraction(element.max) * Fraction(2) ** (code - 127)
             for a, code in zip(amax[differ].tolist(), scales[differ].flatten().tolist(), strict=True)]  # fmt: skip
    assert not any(held)
    np.testing.assert_array_equal(
        mine[differ].flatten(), mx_exponents.codes_of_quotient(amax[differ].float().numpy(), element, "te")
    )


@MODE
@ELEMENT
def test_blocks_below_the_smallest_scale(torchao: Any, element: Format, dialect: str) -> None:
    """torchao 0.18 divides elements under code 0, 2^-127, by 2^-126, in RCEIL by 1: they decode to half, and to 0."""
    amax = float(element.max * 2.0**-128)
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([amax, -amax])
    scales, codes = theirs(torchao, x, element, dialect)
    mine, elements = ours(x, element, dialect)
    assert scales.tolist() == mine.tolist() == [[0]]
    divisor = 1.0 if dialect == "te" else 2.0**-126
    for found, by in ((elements, 2.0**-127), (codes, divisor)):
        expected = rounding.encode(amax / by, element)
        assert found[0, :2].tolist() == [expected, expected | element.sign_code]


@MODE
@ELEMENT
def test_infinity_has_torchaos_scale_and_code(torchao: Any, element: Format, dialect: str) -> None:
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([math.inf, -math.inf, 1.0])
    scales, codes = theirs(torchao, x, element, dialect)
    mine, elements = ours(x, element, dialect)
    assert torch.equal(mine, scales)
    assert torch.equal(elements, codes)


@MODE
def test_nan_spoils_the_scale_of_its_block_there(torchao: Any, dialect: str) -> None:
    """`te`, which is its RCEIL, leaves NaN out of the amax as Transformer Engine does."""
    x = torch.ones(1, 32)
    x[0, 7] = math.nan
    scales, codes = theirs(torchao, x, E4M3, dialect)
    assert scales.tolist() == [[255]]
    assert codes[0, 7] == 127
    mine, elements = ours(x, E4M3, dialect)
    assert torch.equal(mine, scales) == (dialect != "te")
    assert elements[0, 7] == 127
