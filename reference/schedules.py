"""How far a float32 sum in a declared order can be from the exact one: tier 1 of tolerance.md.

The order is "blocks": products of a block of K, which are exact, are added in order of K from 0; a block's sum, times
its scales, is added to the sum of the blocks before it, in order of K.

The running error bound: where the sum s of what an addition is given is off by at most e, the addition adds at most
u·(|s| + e) to that, or nothing where it cannot round. It cannot where one of the two is 0, or where neither what came
before nor this has rounded, since all is a multiple of one power of two and below 2^24 of it. s and e are evaluated in
float64: the rounding of s there, at most K·2^-53 of the sum of magnitudes A for each of 2·K additions, adds K^2·2^-76·A
to a bound that is not 0, and 2^-20 of the bound covers that of e.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reference.blocks import slabs
from reference.exact import lowest_bit

UNIT = 2.0**-24
ACCUMULATOR_BITS = 24
FLT_MAX = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149
# Columns whose partial sums are looked at together first, since most of them cannot round.
_CHUNK = 32


@dataclass
class Running:
    """Sums (M, N) on their way along K, float64."""

    total: torch.Tensor
    magnitude: torch.Tensor
    """The sum of magnitudes."""
    unit: torch.Tensor
    """A power of two that divides every term; infinity where all are 0."""
    error: torch.Tensor
    """The largest distance of the float32 sum from the exact one. Evaluation in float64 is not covered."""

    def exact(self) -> torch.Tensor:
        """bool: no partial sum so far, in whatever order, can have rounded."""
        return (self.error == 0) & ((self.magnitude + self.total.abs()) / 2 <= 2.0**ACCUMULATOR_BITS * self.unit)


def empty(m: int, n: int, device: torch.device) -> Running:
    """The sum of nothing, (M, N)."""
    zeros = torch.zeros(m, n, dtype=torch.float64, device=device)
    return Running(zeros, zeros, torch.full_like(zeros, torch.inf), zeros)


def running_sum(left: torch.Tensor, right: torch.Tensor) -> Running:
    """The products of (M, K) and (N, K), finite float64 numbers, added in order of K from 0."""
    sums = empty(left.shape[0], right.shape[0], left.device)
    for start in range(0, left.shape[1], _CHUNK):
        x, y = left[:, start : start + _CHUNK], right[:, start : start + _CHUNK]
        magnitude = x.abs() @ y.abs().T
        after = Running(
            sums.total + x @ y.T,
            sums.magnitude + magnitude,
            torch.minimum(sums.unit, torch.outer(lowest_bit(x), lowest_bit(y)).masked_fill_(magnitude == 0, torch.inf)),
            sums.error,
        )
        exact = after.exact()
        if not bool(exact.all()):
            after.error = _every_partial(x, y, sums).masked_fill_(exact, 0.0)
        sums = after
    return sums


def _every_partial(x: torch.Tensor, y: torch.Tensor, before: Running) -> torch.Tensor:
    """The error after the columns of `x` and `y` have been added to `before` one by one.

    e + u·(|s| + e) at every step is at most (e + u·Σ|s|)·(1 + u)^n after n of them.
    """
    columns = x.shape[1]
    total, sizes = before.total.clone(), torch.zeros_like(before.total)
    begun = before.magnitude != 0
    zeros = ((x == 0).any(0) | (y == 0).any(0)).tolist()
    for column, some_zero in enumerate(zeros):
        total.addr_(x[:, column], y[:, column])
        if some_zero or column == 0:  # what is added, or added to, may be 0
            adds = torch.outer(x[:, column] != 0, y[:, column] != 0)
            sizes.add_(total.abs().mul_(begun & adds))
            begun |= adds
        else:
            begun.fill_(True)
            sizes.add_(total.abs())
    return (before.error + UNIT * sizes) * (1 + columns * UNIT * (1 + 2.0**-10))


def blocks_error(
    left: torch.Tensor, right: torch.Tensor, left_scales: torch.Tensor, right_scales: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(error, overflow) (M, N) of the sums of (M, K) by (N, K) in the order "blocks".

    Operands are codes and scales (M, B) and (N, B) of blocks of `width` columns, all float64 and finite. A block's sum
    times its scales rounds once, and that only where it is no multiple of 2^-149 or too large. overflow, bool: a
    partial sum may have no float32.
    """
    m, n = left.shape[0], right.shape[0]
    error = torch.zeros(m, n, dtype=torch.float64, device=left.device)
    overflow = torch.zeros(m, n, dtype=torch.bool, device=left.device)
    unit_left, unit_right = lowest_bit(left_scales.unsqueeze(2)), lowest_bit(right_scales.unsqueeze(2))
    for rows in slabs(error):
        sums = empty(len(left[rows]), n, left.device)
        for block, start in enumerate(range(0, left.shape[1], width)):
            columns = slice(start, start + width)
            inner = running_sum(left[rows, columns], right[:, columns])
            scale = torch.outer(left_scales[rows, block], right_scales[:, block])
            unit = inner.unit * torch.outer(unit_left[rows, block], unit_right[:, block])
            magnitude = inner.magnitude * scale.abs()
            nothing = magnitude == 0
            begun = (sums.magnitude != 0) & ~nothing
            rounding = ((unit < SMALLEST) & ~nothing).double() * (SMALLEST / 2)
            term, term_error = inner.total * scale, inner.error * scale.abs() + rounding
            sums = Running(
                sums.total + term,
                sums.magnitude + magnitude,
                torch.minimum(sums.unit, unit.masked_fill_(nothing, torch.inf)),
                sums.error + term_error,
            )
            size = sums.total.abs() + sums.error
            sums.error += torch.where(begun & ~sums.exact(), UNIT * size, 0.0)
            overflow[rows] |= torch.maximum(size, term.abs() + term_error) * (1 + UNIT) >= FLT_MAX
        error[rows] = widened(sums, left.shape[1])
    return error, overflow


def widened(sums: Running, columns: int) -> torch.Tensor:
    """The error of sums of K = `columns` products with that of its own evaluation in float64, 0 where it is 0."""
    own = float(columns) ** 2 * 2.0**-76 * sums.magnitude
    return torch.where(sums.error > 0, sums.error * (1 + 2.0**-20) + own, 0.0)
