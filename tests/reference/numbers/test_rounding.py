"""`nearest_even` on the bits, against round-half-even of exact fractions on the sorted list of values."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch

from narrowgauge.reference.numbers.rounding import nearest_even
from narrowgauge.reference.scalar import rounding
from narrowgauge.spec.formats import FORMATS, Format
from tests.reference.samples import boundaries

EVERY = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)


def counts(x: np.ndarray, fmt: Format) -> np.ndarray:
    return nearest_even(torch.from_numpy(x).view(torch.int32), fmt).numpy()


@EVERY
def test_every_midpoint_and_its_neighbours_round_as_fractions_do(fmt: Format) -> None:
    x = boundaries(fmt)
    x = x[~np.signbit(x)]
    expected = np.array([rounding.nearest_code(Fraction(float(v)), fmt) for v in x])
    at_overflow = expected > fmt.max_code
    np.testing.assert_array_equal(counts(x, fmt)[~at_overflow], expected[~at_overflow])
    assert (counts(x, fmt)[at_overflow] > fmt.max_code).all()


@EVERY
def test_a_tie_goes_to_the_even_code(fmt: Format) -> None:
    points = rounding.grid(fmt)[:-1]
    ties = [float((low + high) / 2) for low, high in pairwise(points)]
    even = [code + code % 2 for code in range(len(ties))]
    np.testing.assert_array_equal(counts(np.array(ties, np.float32), fmt), even)


@EVERY
def test_the_count_never_falls_as_the_magnitude_grows(fmt: Format) -> None:
    magnitudes = torch.arange(0, 0x7F800001, 0x1001, dtype=torch.int32)
    assert (nearest_even(magnitudes, fmt).diff() >= 0).all()
