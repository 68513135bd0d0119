"""S0E5M3 of all E4M3 scales, against the bits of numpy's float16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from narrowgauge import adapt
from narrowgauge.spec.formats import E4M3

ALL = torch.arange(0x7F, dtype=torch.uint8)
ONE = torch.ones(1)


def of_float16(scales: torch.Tensor, factor: float) -> list[int]:
    """The odd byte of the bits, shifted left by 1, of float16(s·F·2^7); numbers below 2 are 0."""
    numbers = np.array([E4M3.value(code) for code in scales.tolist()]) * factor * 2.0**7
    bits = numbers.astype(np.float16).view(np.uint16).astype(np.uint32)
    return [int(word << 1) >> 8 & 0xFF if number >= 2 else 0 for word, number in zip(bits, numbers, strict=True)]


@pytest.mark.parametrize("factor", [1.0, 0.5, 2.0**-6])
def test_every_scale_is_the_upper_part_of_a_float16_number(factor: float) -> None:
    found = adapt.marlin_scales(ALL, ONE, factor)
    assert found.scales.tolist() == of_float16(ALL, factor)
    assert float(found.tensor_scale) == 1 / factor


def test_without_a_factor_the_seven_smallest_scales_are_lost() -> None:
    found = adapt.marlin_scales(ALL, ONE, 1.0)
    lost = (found.scales == 0) & (ALL != 0)
    assert lost.nonzero().flatten().tolist() == list(range(1, 8))
    assert E4M3.value(7) == 0.013671875
    assert torch.equal(adapt.from_marlin_scales(found.scales, 1.0), ALL.masked_fill(lost, 0))


@pytest.mark.parametrize("exponent", range(-6, 9))
def test_the_decoded_scales_do_not_change(exponent: int) -> None:
    """The product of scale and tensor scale is the same for every F under which no scale is too small or too large."""
    factor = 2.0**exponent
    values = torch.tensor(E4M3.values)[ALL.long()].double() * factor * 2.0**7
    scales = ALL[(values >= 2) & (values <= 65504)]
    found = adapt.marlin_scales(scales, ONE, factor)
    assert len(scales) > 60
    assert torch.equal(adapt.from_marlin_scales(found.scales, factor), scales)
    assert float(found.tensor_scale) * factor == 1.0


def test_signs_and_numbers_beyond_float16_are_refused() -> None:
    with pytest.raises(ValueError, match="scales are negative or NaN; Marlin stores no sign"):
        adapt.marlin_scales(torch.tensor([0x81], dtype=torch.uint8), ONE, 1.0)
    with pytest.raises(ValueError, match=r"factor is 2\.0, and the largest scale 448\.0: 114688\.0 is no float16"):
        adapt.marlin_scales(ALL, ONE, 2.0)
    with pytest.raises(ValueError, match="which is no value of E4M3"):
        adapt.from_marlin_scales(torch.tensor([0xFE], dtype=torch.uint8), 2.0**-7)
