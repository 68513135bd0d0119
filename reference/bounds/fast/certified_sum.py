"""Running error bounds of sequential sums, equal bit for bit to `sequential_sum`, but with a certificate.

The certificate (`reference.bounds.fast.exactness_certificate`) settles most outputs at once. Only the partial sums of
the remaining outputs are followed addition by addition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.reference.bounds.fast.exactness_certificate import ExactnessCertificate, magnitude_in_quanta
from narrowgauge.reference.bounds.running_error import (
    CHUNK,
    PartialSums,
    error_growth,
    follow_additions,
    sequential_sum,
)
from narrowgauge.reference.numbers.exact import FLOAT64_EXACT, lowest_bits
from narrowgauge.reference.numbers.slabs import slabs
from narrowgauge.spec.summation import ACCUMULATOR_BITS

# If more than 1/16 of the outputs are doubtful, sums that keep their sign are settled first. If 1/4 of the outputs are
# still doubtful, all outputs are followed.
_SIGN_CHECK, _FOLLOW_ALL = 16, 4
# Temporary arrays (doubtful outputs, columns) in use at the same time.
_ARRAYS = 4


@dataclass
class _Chunk:
    """Columns (M, W) and (N, W), whose products are added to `before` one by one with relative error `roundoff`."""

    x: torch.Tensor
    y: torch.Tensor
    roundoff: float
    before: PartialSums
    reached: torch.Tensor
    """`magnitude_in_quanta` of the partial sums of each output (M, N)."""
    limit: float
    """Largest value of `reached` at which no partial sum rounds."""
    no_zeros: tuple[torch.Tensor, torch.Tensor]
    """bool (M,) and (N,): rows without a zero."""

    @property
    def growth(self) -> float:
        """Factor by which the additions of the chunk multiply an earlier error."""
        return error_growth(self.x.shape[1], self.roundoff)

    @property
    def summable(self) -> float:
        """Largest value of `reached` at which Σ|s| over all partial sums is exact in float64, in any order."""
        return self.limit * (FLOAT64_EXACT / 2.0**ACCUMULATOR_BITS / self.x.shape[1])

    def same_sign_errors(self, same_sign: torch.Tensor) -> torch.Tensor:
        """The errors (M, N) of outputs that rounded before and whose partial sums have the `same_sign`; 0 elsewhere.

        For these outputs Σ|s| equals |Σs|, to which each product contributes once per partial sum that contains it.
        """
        columns = self.x.shape[1]
        times = torch.arange(columns, 0, -1, dtype=self.x.dtype, device=self.x.device)
        roundoff, total = self.roundoff, self.before.total
        error = torch.addmm(total, self.x * times, self.y.T, beta=columns * roundoff, alpha=roundoff).abs_()
        settled = same_sign.logical_and_(self.before.error != 0).logical_and_(self.reached <= self.summable)
        settled &= self.no_zeros[0].unsqueeze(1) & self.no_zeros[1]  # a product of 0 is no addition
        return error.add_(self.before.error).mul_(self.growth).mul_(settled)

    def follow_doubtful(self, doubtful: torch.Tensor, error: torch.Tensor) -> bool:
        """Writes the errors of the `doubtful` outputs, bool (M, N), that round into `error`.

        Returns False, without a result, if too many outputs are doubtful or Σ|s| is not exact in float64.
        """
        at = doubtful.view(-1).nonzero().squeeze(1)
        if at.numel() * _FOLLOW_ALL > error.numel():
            return False
        if bool((self.reached.view(-1).index_select(0, at) > self.summable).any()):
            return False
        for part in slabs(at.unsqueeze(1).expand(-1, _ARRAYS * self.x.shape[1])):
            self._write_errors(at[part], error)
        return True

    def _write_errors(self, at: torch.Tensor, error: torch.Tensor) -> None:
        """Writes the errors of the outputs `at` (P,), flat indices, into `error`."""
        rows, columns = at.div(len(self.y), rounding_mode="floor"), at % len(self.y)
        sums = self.x.index_select(0, rows).mul_(self.y.index_select(0, columns))
        sums[:, 0] += self.before.total.view(-1).index_select(0, at)
        torch.cumsum(sums, 1, out=sums)
        earlier = self.before.error.view(-1).index_select(0, at)
        rounded = sums.float().double().sub_(sums).abs_().sum(1).add_(earlier).nonzero().squeeze(1)
        at, rows, columns, sums, earlier = (
            values.index_select(0, rounded) for values in (at, rows, columns, sums, earlier)
        )
        begun = self.before.magnitude.view(-1).index_select(0, at) != 0
        # An addition with an input without nonzero products cannot round.
        sizes = sums.abs_()
        sizes[:, 0] *= begun
        no_zeros = self.no_zeros[0].index_select(0, rows) & self.no_zeros[1].index_select(0, columns)
        with_zeros = (~no_zeros).nonzero().squeeze(1)
        if with_zeros.numel():
            adds = (self.x != 0).index_select(0, rows[with_zeros])
            adds = adds & (self.y != 0).index_select(0, columns[with_zeros])
            sizes[with_zeros] *= adds & ((adds.cumsum(1) > 1) | begun[with_zeros].unsqueeze(1))
        error.view(-1)[at] = sizes.sum(1).mul_(self.roundoff).add_(earlier).mul_(self.growth)


def certified_sum(
    left: torch.Tensor,
    right: torch.Tensor,
    roundoff: float,
    before: PartialSums,
    certificate: ExactnessCertificate | None,
) -> PartialSums:
    """The result of `sequential_sum` with the same arguments; without a certificate, by `sequential_sum`.

    With a certificate, `before` has no terms and no peak.
    """
    if certificate is None:
        return sequential_sum(left, right, roundoff, before)
    sizes = left.abs(), right.abs()
    bits = lowest_bits(left), lowest_bits(right)
    # Sums before and after a chunk alternate between two buffers.
    total, magnitude, size, middle, buffer = (torch.empty_like(before.total) for _ in range(5))
    sums = PartialSums(before.total.clone(), before.magnitude.clone(), before.quantum.clone(), before.error)
    power_sums: torch.Tensor | None = None
    rounding = bool(before.error.any())
    for start in range(0, left.shape[1], CHUNK):
        columns = slice(start, start + CHUNK)
        x, y, part = left[:, columns].contiguous(), right[:, columns].contiguous(), certificate.columns(columns)
        torch.mm(sizes[0][:, columns], sizes[1][:, columns].T, out=size)
        torch.outer(bits[0][:, columns].amin(1), bits[1][:, columns].amin(1), out=buffer)
        no_zeros = (x != 0).all(1), (y != 0).all(1)
        if not bool(no_zeros[0].all() & no_zeros[1].all()):
            buffer.masked_fill_(size == 0, torch.inf)
        torch.minimum(sums.quantum, buffer, out=sums.quantum)
        torch.addmm(sums.total, x, y.T, out=total)
        torch.add(sums.magnitude, size, out=magnitude)
        torch.add(sums.total, total, out=middle).abs_()
        if power_sums is None:
            power_sums = part.power_sums()
        else:
            torch.maximum(power_sums, torch.mm(part.left, part.right.T, out=buffer), out=power_sums)
        reached = magnitude_in_quanta(power_sums, torch.add(middle, size, out=buffer))
        doubtful = reached > certificate.exact_limit
        if rounding:
            doubtful |= sums.error != 0
        after = PartialSums(total, magnitude, sums.quantum, sums.error)
        count = int(torch.count_nonzero(doubtful))
        if count:
            chunk = _Chunk(x, y, roundoff, sums, reached, certificate.exact_limit, no_zeros)
            if rounding and count * _SIGN_CHECK > doubtful.numel():
                error = chunk.same_sign_errors(middle >= size)
                doubtful &= error == 0
            else:
                error = torch.zeros_like(total)
            if chunk.follow_doubtful(doubtful, error):
                after.error = error
            else:
                follow_additions(x, y, roundoff, sums, after)
            rounding = rounding or bool(after.error.any())
        sums, total, magnitude = after, sums.total, sums.magnitude
    return sums


def certified_block_error(
    x: torch.Tensor,
    y: torch.Tensor,
    roundoff: float,
    empty: PartialSums,
    total: torch.Tensor,
    size: torch.Tensor,
    certificate: ExactnessCertificate,
) -> torch.Tensor | None:
    """The error of `sequential_sum` of a block of at most `CHUNK` columns added to `empty`; None if no sum rounds.

    `total` and `size` (M, N): sums of the products and of their magnitudes. `certificate`: of these columns.
    """
    reached = magnitude_in_quanta(certificate.power_sums(), total.abs().add_(size))
    doubtful = reached > certificate.exact_limit
    if not bool(doubtful.any()):
        return None
    no_zeros = (x != 0).all(1), (y != 0).all(1)
    chunk = _Chunk(x, y, roundoff, empty, reached, certificate.exact_limit, no_zeros)
    error = torch.zeros_like(total)
    return error if chunk.follow_doubtful(doubtful, error) else sequential_sum(x, y, roundoff, empty).error
