"""Which sums of products cannot round: a few matrix products say so of most, before anyone looks at partial sums.

Where M is the sum of magnitudes of some products, and s and t are the sums before and after them, every partial sum in
between is at most M/2 away from (s + t)/2: it is s plus some of the products, and t less the others. So it has the sign
of s + t where M is at most |s + t|; and it is a float32 number where |s + t| + M is at most 2^25 units, a unit being a
power of two that divides all products so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.reference.numbers.exact import certified, lowest_bits, span
from narrowgauge.spec.summation import ACCUMULATOR_BITS, FLT_MAX

# Of at most 2^7 powers of two the largest is known by the sum of their 8th powers: its exponent is the sum's over 8,
# rounded down. So a matrix product finds it for all outputs. No 8th power of a product of two of these is subnormal.
_LEAST = 2.0**-62
# A float64 number's exponent: where its bits begin, and what is added to it.
_FIELD, _BIAS = 52, 1023


@dataclass
class Marks:
    """What shows how low the bits of products of two operands reach.

    The mark of a number whose lowest bit is l is (c/l)^8, c the lowest of the operand, or 2^-496 where that is less:
    the exponent of a sum of products of marks has the lowest bit of those of the numbers, or a lower one.
    """

    left: torch.Tensor
    """(M, K), float64, times 2; 0 where the number is."""
    right: torch.Tensor
    """(N, K), float64."""
    unit: float
    """A power of two that divides every product."""

    def part(self, rows: slice, others: slice) -> Marks:
        """Those of some rows of the two."""
        return Marks(self.left[rows], self.right[others], self.unit)

    def columns(self, some: slice) -> Marks:
        """Those of some columns."""
        return Marks(self.left[:, some], self.right[:, some], self.unit)

    @property
    def limit(self) -> float:
        """What `reach` is at most of 2^25 units."""
        return 2.0 ** (ACCUMULATOR_BITS + 1 + 128 - _BIAS) * self.unit

    def sum(self) -> torch.Tensor:
        """Sums of products of marks, of 64 columns at most: (M, N). Of more columns the larger of two is as good."""
        return self.left @ self.right.T


def marks(left: torch.Tensor, right: torch.Tensor, *, exact: bool) -> Marks | None:
    """Those of (M, K) and (N, K), finite float64 numbers; None where they would not do.

    That is where all are 0, where a sum of products may be too large or too small for a float32 of its bits, and where
    its sums in float64 may round: a look says so, unless it is known that they are `exact`.
    """
    if 0 in (left.numel(), right.numel()):
        return None
    bits = lowest_bits(left), lowest_bits(right)
    ends = [end for side, low in zip((left, right), bits, strict=True) for end in (low.amin(), side.abs().amax())]
    least_left, most_left, least_right, most_right = torch.stack(ends).tolist()
    unit = least_left * least_right
    if not (2.0**-100 <= unit <= most_left * most_right * left.shape[1] <= FLT_MAX):
        return None
    if not exact and not certified(span(left), span(right)):
        return None
    return Marks(_powers(left, bits[0], least_left).mul_(2.0), _powers(right, bits[1], least_right), unit)


def _powers(side: torch.Tensor, bits: torch.Tensor, least: float) -> torch.Tensor:
    return bits.reciprocal_().mul_(least).clamp_(min=_LEAST).mul_(side != 0).square_().square_().square_()


def reach(sums: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """`most` (M, N) over the lowest bits that `sums` of marks show, by the measure of `Marks.limit`.

    Twice a sum of 8th powers, 2^-8g the largest, is from 2^(1 - 8g) to less than 2^(8 - 8g), so its exponent and bias
    over 8 are 128 - g, rounded down. That is the exponent of 2^-g but for another bias.
    """
    exponents = sums.view(torch.int64) >> (_FIELD + 3)
    return exponents.bitwise_left_shift_(_FIELD).view(torch.float64).mul_(most)
