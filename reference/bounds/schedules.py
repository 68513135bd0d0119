"""How far a float32 sum in a declared order can be from the exact one: docs/tolerance.md#declared-order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from narrowgauge.reference.bounds.certificate import Marks, marks
from narrowgauge.reference.bounds.marked import block_error, marked_sum
from narrowgauge.reference.bounds.running import CHUNK, Running, empty, growth, tree_sum, widened
from narrowgauge.reference.numbers.blocks import tiles
from narrowgauge.reference.numbers.exact import FLOAT64_EXACT, has_powers, lowest_bit
from narrowgauge.spec.summation import ACCUMULATOR_BITS, FLT_MAX, Summation

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
    marks: Marks | None = None
    """Those of the operands whose products are summed first: with scales or without."""

    def part(self, rows: slice, others: slice) -> Terms:
        """Those of some outputs."""
        return replace(
            self, left=self.left[rows], right=self.right[others],
            codes=(self.codes[0][rows], self.codes[1][others]), scales=(self.scales[0][rows], self.scales[1][others]),
            magnitude=self.magnitude[rows, others], unit=self.unit[rows, others],
            marks=None if self.marks is None else self.marks.part(rows, others),
        )  # fmt: skip

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
    # Where float64 is exact, and nothing underflows or overflows, one loop does for all blocks: where their sums are
    # exact, or are looked at in one piece and have scales that change no bit.
    exact = (
        summation.order == "blocks"
        and not overflows
        and bool((terms.magnitude <= FLOAT64_EXACT * (1 - 2.0**-20) * terms.unit).all())
        and bool(((terms.unit >= summation.normal) | (terms.magnitude == 0)).all())
    )
    plain = exact and terms.width * terms.span <= 2.0**ACCUMULATOR_BITS
    scaled: Marks | None = None
    if exact and not plain and terms.width <= CHUNK and all(map(has_powers, terms.scales)):
        scaled = marks(terms.left, terms.right, exact=True)
    terms = replace(terms, marks=scaled)
    if not (plain or scaled or overflows or summation.order == "tree"):
        summed = (terms.left, terms.right) if summation.order == "sequential" else terms.codes
        terms = replace(terms, marks=marks(*summed, exact=False))
    # A tree has up to 32 numbers of each output at a time.
    for here in tiles(error, 8 if summation.order == "tree" else 1):
        if bool(settled[here].all()):
            continue
        some = terms.part(*here)
        if plain:
            error[here] = _exact_blocks(some, summation.unit) * (1 + 2.0**-20)
            continue
        sums = _scaled_blocks(some, summation.unit) if scaled else _sums(some, summation, overflows)
        error[here] = widened(sums, terms.columns, summation.unit)
        if sums.peak is not None:
            overflow[here] = (sums.peak + sums.error) * (1 + summation.unit) >= FLT_MAX
    return error, overflow


def _sums(terms: Terms, summation: Summation, peak: bool) -> Running:
    """The sums in any order."""
    left, right = terms.left, terms.right
    start = empty(left.shape[0], right.shape[0], left.device, peak=peak)
    if summation.order in ("sequential", "tree"):
        own = _underflow(terms.unit, summation)
        if summation.order == "tree":
            return tree_sum(left, right, summation.unit, own, peak=peak)
        start.error = own * ((left != 0).double() @ (right != 0).double().T)
        return marked_sum(left, right, summation.unit, start, terms.marks)
    if summation.slices == 1:
        return _blocks(terms, summation, slice(0, terms.columns), start)
    parts = [
        _blocks(terms, summation, columns, start) for columns in sliced(terms.columns, terms.cut, summation.slices)
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


def _blocks(terms: Terms, summation: Summation, columns: slice, sums: Running) -> Running:
    """The blocks that begin in `columns`, or their part of the only block, added to `sums` in order."""
    left, right = (codes[:, columns] for codes in terms.codes)
    shown = None if terms.marks is None else terms.marks.columns(columns)
    left_scales, right_scales = terms.scales
    left_units, right_units = (lowest_bit(scales.unsqueeze(2)) for scales in (left_scales, right_scales))
    first = columns.start // terms.width
    none = empty(left.shape[0], right.shape[0], left.device, peak=sums.peak is not None)
    for number, start in enumerate(range(0, left.shape[1], terms.width), first):
        here = slice(start, start + terms.width)
        some = None if shown is None else shown.columns(here)
        inner = marked_sum(left[:, here], right[:, here], summation.unit, none, some)
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


def _scaled_blocks(terms: Terms, unit: float) -> Running:
    """The sums in the order "blocks" of up to `CHUNK` columns, where float64 is exact and no scale changes a bit.

    As `_blocks` finds them, to the bit.
    """
    assert terms.marks is not None
    left, right = terms.left, terms.right
    sizes = left.abs(), right.abs()
    none = empty(left.shape[0], right.shape[0], left.device)
    total, error, size = (torch.zeros_like(none.total) for _ in range(3))
    near, back = torch.empty_like(total, dtype=torch.float32), torch.empty_like(total)
    begins: torch.Tensor | None = torch.ones_like(total, dtype=torch.bool)
    for start in range(0, terms.columns, terms.width):
        here = slice(start, start + terms.width)
        x, y = left[:, here].contiguous(), right[:, here].contiguous()
        product, magnitude = x @ y.T, torch.mm(sizes[0][:, here], sizes[1][:, here].T, out=size)
        own = block_error(x, y, unit, none, product, magnitude, terms.marks.columns(here))
        if own is not None:
            error.add_(own)
        total.add_(product)
        rounds = back.copy_(near.copy_(total)) != total
        rounds |= error != 0
        # Where the block, or all before it, has no product that is not 0, nothing is added.
        nothing = _no_product(x, y)
        if nothing is not None:
            rounds &= ~nothing
        if begins is not None:
            rounds &= ~begins
            begins = None if nothing is None else begins & nothing
        error.add_(torch.abs(total, out=size).add_(error).mul_(rounds).mul_(unit))
    return Running(total, terms.magnitude, terms.unit, error)


def _exact_blocks(terms: Terms, unit: float) -> torch.Tensor:
    """The error of the order "blocks" where block sums and float64 are exact: u·Σ|s| from the first that rounds on."""
    left, right = terms.left, terms.right
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
