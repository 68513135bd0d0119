"""Certificate that no partial sum of products can round, by a few matrix products for most outputs at once.

Let M be the sum of the magnitudes of some products, and let s and t be the sums before and after these products. A
partial sum between s and t adds a subset of the products to s and lacks the rest in t, hence its distance from
(s + t)/2 is at most M/2. If M ≤ |s + t|, every such partial sum has the sign of s + t. If |s + t| + M ≤ 2^25·q, with q
a power of two that divides all products so far, every such partial sum is a float32 number.
Source: docs/tolerance.md#declared-order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.reference.numbers.exact import certified, lowest_bits, span
from narrowgauge.spec.summation import ACCUMULATOR_BITS, FLT_MAX

# A sum of at most 2^7 eighth powers of powers of two has eight times the exponent of the largest power of two, if the
# quotient is rounded down. Hence a matrix product finds the largest power of two of every output. The product of two
# eighth powers of numbers of at least this size is not subnormal.
_SMALLEST_RATIO = 2.0**-62
# First bit of the exponent of a float64 number, and bias of the exponent.
_EXPONENT_SHIFT, _EXPONENT_BIAS = 52, 1023


@dataclass
class ExactnessCertificate:
    """Eighth powers of the lowest bits of two operands, from which a matrix product finds the lowest bit of products.

    An operand element with lowest bit l has the entry (c/l)^8, with c the lowest bit of the whole operand, or 2^-496
    if this is larger. The exponent of a sum of products of entries gives the lowest bit of the products of elements,
    or a lower bit.
    """

    left: torch.Tensor
    """(M, K), float64, entries times 2; 0 for an element 0."""
    right: torch.Tensor
    """(N, K), float64, entries; 0 for an element 0."""
    quantum: float
    """A power of two that divides every product."""

    def part(self, left_rows: slice, right_rows: slice) -> ExactnessCertificate:
        """The certificate of some rows of the operands."""
        return ExactnessCertificate(self.left[left_rows], self.right[right_rows], self.quantum)

    def columns(self, columns: slice) -> ExactnessCertificate:
        """The certificate of some columns of the operands."""
        return ExactnessCertificate(self.left[:, columns], self.right[:, columns], self.quantum)

    @property
    def exact_limit(self) -> float:
        """Largest value of `magnitude_in_quanta` of sums that cannot round: 2^25·q."""
        return 2.0 ** (ACCUMULATOR_BITS + 1 + 128 - _EXPONENT_BIAS) * self.quantum

    def power_sums(self) -> torch.Tensor:
        """Sums of products of entries (M, N), of at most 64 columns. For more columns take the maximum of two sums."""
        return self.left @ self.right.T


def exactness_certificate(left: torch.Tensor, right: torch.Tensor, *, exact: bool) -> ExactnessCertificate | None:
    """The certificate of the products of (M, K) and (N, K), finite float64 numbers, or None if there is no certificate.

    No certificate exists if all products are 0, if a sum of products may be too large or too small for float32, or if
    sums in float64 may round. `exact`: the caller knows that sums in float64 do not round, so this is not checked.
    """
    if 0 in (left.numel(), right.numel()):
        return None
    bits = lowest_bits(left), lowest_bits(right)
    ends = [end for side, low in zip((left, right), bits, strict=True) for end in (low.amin(), side.abs().amax())]
    least_left, most_left, least_right, most_right = torch.stack(ends).tolist()
    quantum = least_left * least_right
    if not (2.0**-100 <= quantum <= most_left * most_right * left.shape[1] <= FLT_MAX):
        return None
    if not exact and not certified(span(left), span(right)):
        return None
    return ExactnessCertificate(
        _eighth_powers(left, bits[0], least_left).mul_(2.0), _eighth_powers(right, bits[1], least_right), quantum
    )


def _eighth_powers(side: torch.Tensor, bits: torch.Tensor, least: float) -> torch.Tensor:
    ratios = bits.reciprocal_().mul_(least).clamp_(min=_SMALLEST_RATIO).mul_(side != 0)
    return ratios.square_().square_().square_()


def magnitude_in_quanta(power_sums: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """`magnitude` (M, N) divided by the lowest bits from `power_sums`, on the scale of `exact_limit`.

    Let 2^-8g be the largest eighth power in a sum. Twice the sum lies between 2^(1 − 8g) and 2^(8 − 8g), so its biased
    exponent divided by 8 and rounded down is 128 − g: the exponent of 2^-g with another bias.
    """
    exponents = power_sums.view(torch.int64) >> (_EXPONENT_SHIFT + 3)
    return exponents.bitwise_left_shift_(_EXPONENT_SHIFT).view(torch.float64).mul_(magnitude)
