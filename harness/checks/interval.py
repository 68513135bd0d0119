"""The interval that holds every rotated value, whatever the order in which a rotation adds:
docs/tolerance.md#boundary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.reference.numbers.blocks import slabs
from narrowgauge.reference.quantize.hadamard import coefficient, signs
from narrowgauge.spec.arguments import check_rotation
from narrowgauge.spec.recipes import Recipe

UNIT = 2.0**-24
UNIT64 = 2.0**-53
FLT_MAX = torch.finfo(torch.float32).max
_WIDER = 1 + 2.0**-40
"""Covers the rounding of float64 sums of magnitudes."""


@dataclass
class Interval:
    """Numbers known to lie in [lower, upper], tensors of one shape and dtype. -0 as an end is below +0."""

    lower: torch.Tensor
    upper: torch.Tensor
    undetermined: torch.Tensor
    """bool: sums that overflow in one order and not in another; anything is right, NaN too."""

    @property
    def magnitude(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the greatest magnitude that each number can have; NaN of a NaN."""
        ends = torch.stack([self.lower.abs(), self.upper.abs()])
        least = torch.where((self.lower <= 0) & (self.upper >= 0), 0.0, ends.amin(0))
        return least, ends.amax(0)


def rotated_interval(x: torch.Tensor, recipe: Recipe) -> Interval:
    """Where `transform(x, recipe)` lies, bfloat16 (M, K), for any order or tree of float32 additions, fused or not.

    Products are exact in float32. With v the exact sum of a row of the rotation, n its nonzero products and A the sum
    of their magnitudes, float32 gives [v - E, v + E], E = (n - 1)·u·A (Jeannerod and Rump 2013), and 0 where the
    products are such multiples of one power of two that no partial sum can round; rounding to bfloat16 is monotone. v
    and A are evaluated in float64, whose own error is added. A kernel that rounds the exact sum to bfloat16 lies in it
    too, because ends are rounded outward to float32 first.

    Raises as `transform` does.
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
        # Every partial sum of either sign stays below 2^24 of the unit that divides all products.
        exact = (total + v.abs()) / 2 <= 2.0**24 * _unit(products)
        error = ((count - 1).clamp(min=0) * UNIT + count * UNIT64) * total * _WIDER
        error = torch.where(exact | ~finite, 0.0, error)
        overflow = finite & (total * _WIDER > FLT_MAX * (1 - 2.0**-16))
        ends = torch.where(overflow, -torch.inf, _down(v - error)), torch.where(overflow, torch.inf, -_down(-v - error))
        shape = x[rows].shape
        low, high = (end.to(torch.bfloat16) for end in ends)
        # A sum of 0 has either sign.
        low = torch.where((low == 0) & (v - error <= 0), -0.0, low)
        high = torch.where((high == 0) & (v + error >= 0), 0.0, high)
        lower[rows], upper[rows] = low.view(shape), high.view(shape)
        undetermined[rows] = overflow.expand(-1, group).reshape(shape)
    return Interval(lower, upper, undetermined)


def _sylvester(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _down(v: torch.Tensor) -> torch.Tensor:
    """The largest float32 that is not above `v`, float64."""
    near = v.float()
    return torch.where(near.double() > v, torch.nextafter(near, torch.full_like(near, -torch.inf)), near)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent, float64, exact: exponents from -1022 to 1023. torch.ldexp makes its power in float32."""
    return (exponent.long() + 1023).bitwise_left_shift_(52).view(torch.float64)


def _unit(products: torch.Tensor) -> torch.Tensor:
    """The largest power of two that divides all products of a row, float64 (G, 1); 1 where all are 0 or not finite.

    A product has at most 16 significant bits, so its lowest one is that of an integer after scaling by its exponent.
    """
    mantissa, exponent = torch.frexp(products.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
    integer = (mantissa * 2.0**30).long()
    bit = (integer & -integer).double() * power_of_two(exponent - 30)
    return torch.where(integer == 0, torch.inf, bit).amin(1, keepdim=True).nan_to_num(posinf=1.0)
