"""Interval of a rotated value, for every order of a rotation's additions: docs/tolerance.md#boundary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.reference.numbers.slabs import slabs
from narrowgauge.reference.quantize.hadamard import coefficient, signs
from narrowgauge.spec.arguments import check_rotation
from narrowgauge.spec.recipes import Recipe

UNIT = 2.0**-24
UNIT64 = 2.0**-53
FLT_MAX = torch.finfo(torch.float32).max
_LARGEST, _SECOND = torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).max - 2.0**120
"""The two largest numbers of bfloat16."""
_WIDER = 1 + 2.0**-40
"""Factor that covers the rounding of float64 sums of magnitudes."""


@dataclass
class Interval:
    """Intervals [lower, upper] of numbers, as tensors of equal shape and dtype. -0 as an end is below +0."""

    lower: torch.Tensor
    upper: torch.Tensor
    undetermined: torch.Tensor
    """bool: partial sums may overflow to either infinity. Every value is correct for them, NaN too."""

    @property
    def magnitude(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Smallest and largest magnitude of each number. NaN for a NaN."""
        ends = torch.stack([self.lower.abs(), self.upper.abs()])
        least = torch.where((self.lower <= 0) & (self.upper >= 0), 0.0, ends.amin(0))
        return least, ends.amax(0)


def rotated_interval(x: torch.Tensor, recipe: Recipe) -> Interval:
    """Interval of `transform(x, recipe)`, bfloat16 (M, K), for any order or tree of float32 additions, fused or not.

    Products are exact in float32. Let v be the exact sum of a row of the rotation, n the number of its nonzero products
    and A the sum of their magnitudes. Every float32 sum lies in [v - E, v + E] with E = (n - 1)·u·A (Jeannerod and
    Rump 2013). E is 0 if the products are multiples of a power of two so large that no partial sum can round. Rounding
    to bfloat16 is monotone. v and A are evaluated in float64, and the error of this evaluation is added to E. The
    interval also contains the exact sum rounded to bfloat16, because its ends are first rounded outward to float32.

    No partial sum is above S + E or below -T - E, with S and T the sums of the magnitudes of the positive and of the
    negative products. If only S + E exceeds the largest number, no partial sum is -infinity: a sum that overflows stays
    +infinity and never becomes NaN: the interval is [v - E, +infinity]; the same for the other sign.

    Raises the errors of `transform`.
    """
    rotation = check_rotation(x, recipe)
    group = rotation.group
    lower, upper = torch.empty_like(x), torch.empty_like(x)
    undetermined = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    factors = (signs(rotation).double() * coefficient(group)).to(x.device)
    sylvester = _sylvester(group).to(x.device)
    for rows in slabs(x) if x.numel() else ():
        products = x[rows].double().view(-1, group) * factors
        v = products @ sylvester
        total = products.abs().sum(1, keepdim=True)
        finite = torch.isfinite(total)
        count = (products != 0).sum(1, keepdim=True)
        # Each partial sum of positive or of negative products is at most 2^24 times the unit that divides all products.
        exact = (total + v.abs()) / 2 <= 2.0**24 * _unit(products)
        error = ((count - 1).clamp(min=0) * UNIT + count * UNIT64) * total * _WIDER
        parts = ((total + v) / 2 * _WIDER + error, (total - v) / 2 * _WIDER + error)
        upward, downward = (finite & (part > FLT_MAX * (1 - 2.0**-16)) for part in parts)
        error = torch.where(exact | ~finite, 0.0, error)
        ends = torch.where(downward, -torch.inf, _down(v - error)), torch.where(upward, torch.inf, -_down(-v - error))
        shape = x[rows].shape
        low, high = (end.to(torch.bfloat16) for end in ends)
        # More than half of these sums may overflow: two neighbouring values would not be a matter of chance.
        low = torch.where(upward & (low == _LARGEST), _SECOND, low)
        high = torch.where(downward & (high == -_LARGEST), -_SECOND, high)
        # The sign of a zero sum depends on the order.
        low = torch.where((low == 0) & (v - error <= 0), -0.0, low)
        high = torch.where((high == 0) & (v + error >= 0), 0.0, high)
        lower[rows], upper[rows] = low.view(shape), high.view(shape)
        undetermined[rows] = (upward & downward).view(shape)
    return Interval(lower, upper, undetermined)


def _sylvester(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _down(v: torch.Tensor) -> torch.Tensor:
    """Largest float32 number that is at most `v` (float64)."""
    near = v.float()
    return torch.where(near.double() > v, torch.nextafter(near, torch.full_like(near, -torch.inf)), near)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Exact 2^exponent in float64, for exponents from -1022 to 1023. torch.ldexp computes the power in float32."""
    return (exponent.long() + 1023).bitwise_left_shift_(52).view(torch.float64)


def _unit(products: torch.Tensor) -> torch.Tensor:
    """Largest power of two that divides all products of a row, float64 (G, 1); 1 if all are 0 or not finite.

    A product has at most 16 significant bits. Its mantissa times 2^30 is therefore an integer, and the lowest bit of
    this integer gives the power of two.
    """
    mantissa, exponent = torch.frexp(products.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
    integer = (mantissa * 2.0**30).long()
    bit = (integer & -integer).double() * power_of_two(exponent - 30)
    return torch.where(integer == 0, torch.inf, bit).amin(1, keepdim=True).nan_to_num(posinf=1.0)
