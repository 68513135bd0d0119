"""Running error bounds as `reference.bounds.running` has them, to the bit, where most sums are known not to round.

A certificate (`reference.bounds.certificate`) clears most outputs at once. Only the others are followed sum by sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.reference.bounds.certificate import Marks, reach
from narrowgauge.reference.bounds.running import CHUNK, Running, every_partial, growth, running_sum
from narrowgauge.reference.numbers.blocks import slabs
from narrowgauge.reference.numbers.exact import FLOAT64_EXACT, lowest_bits
from narrowgauge.spec.summation import ACCUMULATOR_BITS

# Where more than one of so many outputs is in doubt, it pays to find those whose sums keep their sign; and where one of
# so many still is, to look at all.
_SOME, _FEW = 16, 4
# Arrays of the outputs in doubt, by columns, that are in use at a time.
_ARRAYS = 4


@dataclass
class _Columns:
    """Columns (M, W) and (N, W) whose products are added to `before` one by one, each off by at most `unit`."""

    x: torch.Tensor
    y: torch.Tensor
    unit: float
    before: Running
    reached: torch.Tensor
    """What `reach` says of the partial sums of each output (M, N)."""
    limit: float
    """What it is at most where none of them rounds."""
    full: tuple[torch.Tensor, torch.Tensor]
    """bool (M,) and (N,): rows without a zero."""

    @property
    def growth(self) -> float:
        """What the additions make of an error that was there before."""
        return growth(self.x.shape[1], self.unit)

    @property
    def summable(self) -> float:
        """What `reached` is at most where the sizes of all partial sums have a sum in float64, in any order."""
        return self.limit * (FLOAT64_EXACT / 2.0**ACCUMULATOR_BITS / self.x.shape[1])

    def same_sign(self, certain: torch.Tensor) -> torch.Tensor:
        """The errors (M, N) where sums have rounded before, and have one sign, `certain`; 0 elsewhere.

        The sum of their sizes is that of their sum, to which a product adds itself for every sum that it is in.
        """
        columns = self.x.shape[1]
        times = torch.arange(columns, 0, -1, dtype=self.x.dtype, device=self.x.device)
        unit, total = self.unit, self.before.total
        error = torch.addmm(total, self.x * times, self.y.T, beta=columns * unit, alpha=unit).abs_()
        sure = certain.logical_and_(self.before.error != 0).logical_and_(self.reached <= self.summable)
        sure &= self.full[0].unsqueeze(1) & self.full[1]  # what is 0 is not added
        return error.add_(self.before.error).mul_(self.growth).mul_(sure)

    def look(self, doubtful: torch.Tensor, error: torch.Tensor) -> bool:
        """Writes the errors of outputs that are `doubtful`, bool (M, N), and that round, into `error`.

        False where they are not few, or the sizes of their sums have no sum in float64.
        """
        at = doubtful.view(-1).nonzero().squeeze(1)
        if at.numel() * _FEW > error.numel():
            return False
        if bool((self.reached.view(-1).index_select(0, at) > self.summable).any()):
            return False
        for part in slabs(at.unsqueeze(1).expand(-1, _ARRAYS * self.x.shape[1])):
            self._write(at[part], error)
        return True

    def _write(self, at: torch.Tensor, error: torch.Tensor) -> None:
        """The same of outputs `at` (P,), numbered row by row."""
        rows, others = at.div(len(self.y), rounding_mode="floor"), at % len(self.y)
        sums = self.x.index_select(0, rows).mul_(self.y.index_select(0, others))
        sums[:, 0] += self.before.total.view(-1).index_select(0, at)
        torch.cumsum(sums, 1, out=sums)
        earlier = self.before.error.view(-1).index_select(0, at)
        rounded = sums.float().double().sub_(sums).abs_().sum(1).add_(earlier).nonzero().squeeze(1)
        at, rows, others, sums, earlier = (each.index_select(0, rounded) for each in (at, rows, others, sums, earlier))
        begun = self.before.magnitude.view(-1).index_select(0, at) != 0
        # What is added, or added to, may be 0: then nothing rounds.
        sizes = sums.abs_()
        sizes[:, 0] *= begun
        gaps = (~(self.full[0].index_select(0, rows) & self.full[1].index_select(0, others))).nonzero().squeeze(1)
        if gaps.numel():
            adds = (self.x != 0).index_select(0, rows[gaps]) & (self.y != 0).index_select(0, others[gaps])
            sizes[gaps] *= adds & ((adds.cumsum(1) > 1) | begun[gaps].unsqueeze(1))
        error.view(-1)[at] = sizes.sum(1).mul_(self.unit).add_(earlier).mul_(self.growth)


def marked_sum(left: torch.Tensor, right: torch.Tensor, unit: float, before: Running, marks: Marks | None) -> Running:
    """`running_sum` of the same, where there are no `marks` too. With them `before` has neither terms nor a peak."""
    if marks is None:
        return running_sum(left, right, unit, before)
    sizes = left.abs(), right.abs()
    bits = lowest_bits(left), lowest_bits(right)
    # Sums before and after some columns take turns in the same memory.
    total, magnitude, size, middle, other = (torch.empty_like(before.total) for _ in range(5))
    sums = Running(before.total.clone(), before.magnitude.clone(), before.unit.clone(), before.error)
    low: torch.Tensor | None = None
    rounding = bool(before.error.any())
    for start in range(0, left.shape[1], CHUNK):
        here = slice(start, start + CHUNK)
        x, y, some = left[:, here].contiguous(), right[:, here].contiguous(), marks.columns(here)
        torch.mm(sizes[0][:, here], sizes[1][:, here].T, out=size)
        torch.outer(bits[0][:, here].amin(1), bits[1][:, here].amin(1), out=other)
        full = (x != 0).all(1), (y != 0).all(1)
        if not bool(full[0].all() & full[1].all()):
            other.masked_fill_(size == 0, torch.inf)
        torch.minimum(sums.unit, other, out=sums.unit)
        torch.addmm(sums.total, x, y.T, out=total)
        torch.add(sums.magnitude, size, out=magnitude)
        torch.add(sums.total, total, out=middle).abs_()
        low = some.sum() if low is None else torch.maximum(low, torch.mm(some.left, some.right.T, out=other), out=low)
        reached = reach(low, torch.add(middle, size, out=other))
        doubtful = reached > marks.limit
        if rounding:
            doubtful |= sums.error != 0
        after = Running(total, magnitude, sums.unit, sums.error)
        count = int(torch.count_nonzero(doubtful))
        if count:
            columns = _Columns(x, y, unit, sums, reached, marks.limit, full)
            if rounding and count * _SOME > doubtful.numel():
                error = columns.same_sign(middle >= size)
                doubtful &= error == 0
            else:
                error = torch.zeros_like(total)
            if columns.look(doubtful, error):
                after.error = error
            else:
                every_partial(x, y, unit, sums, after)
            rounding = rounding or bool(after.error.any())
        sums, total, magnitude = after, sums.total, sums.magnitude
    return sums


def block_error(
    x: torch.Tensor, y: torch.Tensor, unit: float, none: Running, total: torch.Tensor, size: torch.Tensor, marks: Marks
) -> torch.Tensor | None:
    """The error of `running_sum` of up to `CHUNK` columns, added to `none`; None where no sum rounds.

    `total` and `size` (M, N) are the sums of products and of their magnitudes, `marks` those of the columns.
    """
    reached = reach(marks.sum(), total.abs().add_(size))
    doubtful = reached > marks.limit
    if not bool(doubtful.any()):
        return None
    columns = _Columns(x, y, unit, none, reached, marks.limit, ((x != 0).all(1), (y != 0).all(1)))
    error = torch.zeros_like(total)
    return error if columns.look(doubtful, error) else running_sum(x, y, unit, none).error
