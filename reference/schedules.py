"""How far a float32 sum in a declared order can be from the exact one: tier 1 of tolerance.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from reference.blocks import slabs
from reference.exact import FLOAT64_EXACT, lowest_bit
from reference.running import Running, empty, growth, running_sum, tree_sum, widened
from reference.summation import ACCUMULATOR_BITS, FLT_MAX, Summation

# Blocks after which it is asked anew whether all sums have rounded.
_LOOK = 8


@dataclass
class Terms:
    """The products of two operands (M, K) and (N, K), float64 and finite, scales of blocks included."""

    left: torch.Tensor
    right: torch.Tensor
    codes: tuple[torch.Tensor, torch.Tensor]
    """The operands without scales."""
    scales: tuple[torch.Tensor, torch.Tensor]
    """(M, B) and (N, B)."""
    width: int
    """Columns of a block."""
    cut: int
    """Columns between which "split-<n>" may cut: those of a block, or 1 where one is all of K."""
    span: float
    """The largest product of two codes in units of the smallest, of which all are multiples."""
    magnitude: torch.Tensor
    """Σ of magnitudes (M, N)."""
    unit: torch.Tensor
    """A power of two that divides every term of an output (M, N)."""

    @property
    def columns(self) -> int:
        """K."""
        return self.left.shape[1]


def declared_error(
    terms: Terms, summation: Summation, settled: torch.Tensor, *, overflows: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(error, overflow) (M, N) of the sums in the order that `summation` names; 0 where `settled` is all there is.

    A block's sum times its scales, or a product times its own, rounds once, and that only where it is no multiple of
    2^-149 or too large. overflow, bool: a partial sum may have no float32; only looked for where `overflows`.
    """
    error = torch.zeros_like(terms.magnitude)
    overflow = torch.zeros_like(settled)
    # Where all block sums are exact and so is float64, and nothing underflows or overflows, one loop does for all.
    plain = (
        summation.order == "blocks"
        and not overflows
        and terms.width * terms.span <= 2.0**ACCUMULATOR_BITS
        and bool((terms.magnitude <= FLOAT64_EXACT * (1 - 2.0**-20) * terms.unit).all())
        and bool(((terms.unit >= summation.normal) | (terms.magnitude == 0)).all())
    )
    # A tree has up to 32 numbers of each output at a time.
    columns = error.shape[1] * (8 if summation.order == "tree" else 1)
    for rows in slabs(error.new_empty(1, 1).expand(error.shape[0], columns)):
        if bool(settled[rows].all()):
            continue
        if plain:
            error[rows] = _exact_blocks(terms, rows, summation.unit) * (1 + 2.0**-20)
            continue
        sums = _sums(terms, rows, summation, overflows)
        error[rows] = widened(sums, terms.columns, summation.unit)
        if sums.peak is not None:
            overflow[rows] = (sums.peak + sums.error) * (1 + summation.unit) >= FLT_MAX
    return error, overflow


def _sums(terms: Terms, rows: slice, summation: Summation, peak: bool) -> Running:
    """The sums of some rows."""
    left, right = terms.left[rows], terms.right
    start = empty(left.shape[0], right.shape[0], left.device, peak=peak)
    if summation.order in ("sequential", "tree"):
        own = _underflow(terms.unit[rows], summation)
        if summation.order == "tree":
            return tree_sum(left, right, summation.unit, own, peak=peak)
        start.error = own * ((left != 0).double() @ (right != 0).double().T)
        return running_sum(left, right, summation.unit, start)
    if summation.slices == 1:
        return _blocks(terms, rows, summation, slice(0, terms.columns), start)
    parts = [
        _blocks(terms, rows, summation, columns, start)
        for columns in sliced(terms.columns, terms.cut, summation.slices)
    ]
    sums = parts[0]
    for part in parts[1:]:
        sums = sums.plus(part, summation.unit)
    return sums


def sliced(columns: int, cut: int, slices: int) -> Iterator[slice]:
    """The slices of K of "split-<n>" that are not empty, or an empty one: blocks of `cut` columns in n parts."""
    blocks = -(-columns // cut)
    each = max(1, -(-blocks // slices)) * cut
    for start in range(0, max(1, columns), each):
        yield slice(start, min(start + each, columns))


def _underflow(unit: torch.Tensor, summation: Summation) -> torch.Tensor:
    """What a term that is not 0 can be off by as a float32 number."""
    return (unit < summation.normal).double() * summation.underflow


def _blocks(terms: Terms, rows: slice, summation: Summation, columns: slice, sums: Running) -> Running:
    """The blocks that begin in `columns`, or their part of the only block, added to `sums` in order."""
    left, right = (codes[:, columns] for codes in (terms.codes[0][rows], terms.codes[1]))
    left_scales, right_scales = terms.scales[0][rows], terms.scales[1]
    left_units, right_units = (lowest_bit(scales.unsqueeze(2)) for scales in (left_scales, right_scales))
    first = columns.start // terms.width
    none = empty(left.shape[0], right.shape[0], left.device, peak=sums.peak is not None)
    for number, start in enumerate(range(0, left.shape[1], terms.width), first):
        here = slice(start, start + terms.width)
        inner = running_sum(left[:, here], right[:, here], summation.unit, none)
        factor = torch.outer(left_scales[:, number], right_scales[:, number])
        unit = inner.unit * torch.outer(left_units[:, number], right_units[:, number])
        nothing = inner.magnitude == 0
        term = Running(
            inner.total * factor,
            inner.magnitude * factor.abs(),
            unit.masked_fill_(nothing, torch.inf),
            inner.error * factor.abs() + _underflow(unit, summation).masked_fill_(nothing, 0.0),
        )
        if sums.peak is not None:
            term.peak = term.total.abs()
        sums = sums.plus(term, summation.unit)
    return sums


def _exact_blocks(terms: Terms, rows: slice, unit: float) -> torch.Tensor:
    """The error of the order "blocks" where block sums and float64 are exact: u·Σ|s| from the first that rounds on."""
    left, right = terms.left[rows], terms.right
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.float64, device=left.device)
    sizes, size = torch.zeros_like(total), torch.empty_like(total)
    rounded: torch.Tensor | None = torch.zeros_like(total, dtype=torch.bool)
    near = torch.empty_like(total, dtype=torch.float32)
    steps = 0
    for start in range(0, terms.columns, terms.width):
        x, y = (operand[:, start : start + terms.width] for operand in (left, right))
        total.addmm_(x, y.T)
        torch.abs(total, out=size)
        if rounded is not None:
            rounded |= near.copy_(total) != total
            if steps % _LOOK == 0 and bool(rounded.all()):
                rounded = None
            else:
                size.mul_(rounded)  # a product, which is faster than a choice
        if (nothing := _no_product(x, y)) is not None:
            size.mul_(~nothing)
        sizes.add_(size)
        steps += 1
    return sizes.mul_(unit * growth(steps, unit))


def _no_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    """bool (M, N): every product of (M, W) and (N, W) is 0; None where that is nowhere so.

    Of W columns a row that has p and one that has q which are not 0 share one where p + q > W.
    """
    width = x.shape[1]
    some_x, some_y = (x != 0).float(), (y != 0).float()
    counts_x, counts_y = some_x.sum(1), some_y.sum(1)
    few_x, few_y = counts_x + counts_y.amin() <= width, counts_y + counts_x.amin() <= width
    if not bool(few_x.any()) or not bool((some_x[few_x] @ some_y[few_y].T == 0).any()):
        return None
    return (some_x @ some_y.T) == 0
