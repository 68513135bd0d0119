"""Changes that every product has: an operand or the output is left out, shifted, repeated, transposed or replaced.

The operands are decoded, so that a change can move an element into the block of another scale. The sum of the changed
product has the bound of any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.diagnosis.formulas.matrix_changes import MATRIX_CHANGES, Extents
from narrowgauge.harness.diagnosis.gemm.gemm_parts import Ends, GemmParts, fits, operand_values, ordered_ends
from narrowgauge.harness.diagnosis.gemm.wider_format import outside_sums
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.harness.operations.stages.oracle import dequantize

Sample = tuple[torch.Tensor, torch.Tensor]
"""Numbers of rows and of columns."""
_SIDES = {"left": "a", "right": "b"}
OPERAND: Deviation[Any] = Deviation("operand-exchanged", "{1} is replaced by {0}", "operands")


@dataclass(frozen=True)
class ChangedProduct:
    """A change of every product of a case: of an operand, by its name in `GemmParts`, or of the output."""

    row: Deviation[Any]
    side: str = ""
    """The changed operand, `left` or `right`. Empty: the output."""
    replaces: bool = False
    """Whether the row gives another matrix, with all its scales, in place of the operand."""

    def fitting(self, parts: GemmParts, sample: Sample) -> torch.Tensor | None:
        """bool mask of the sampled outputs that the change can give. None if the change does not apply."""
        selected = parts.select(*sample)
        if not self.side:
            ends = self.output_ends(parts)
            if ends is None:
                return None
            low, high = (end[sample[0]][:, sample[1]] for end in ends)
            return fits(selected.output, [(low, high)], torch.zeros_like(selected.wrong))
        values = {"left": operand_values(parts.left), "right": operand_values(parts.right)}
        if self.replaces:  # neither operand lacks its factor
            values = {"left": dequantize(parts.source.a).double(), "right": dequantize(parts.source.b).double()}
            selected = replace(selected, factor=torch.ones_like(selected.factor))
        changed = _applied(self.row, values[self.side])
        if changed is None:
            return None
        values[self.side] = changed
        outside = outside_sums(selected, values["left"][sample[0]], values["right"][sample[1]])
        return None if outside is None else ~outside

    def output_ends(self, parts: GemmParts) -> Ends | None:
        """Ends of the changed output. None if the change does not apply, or if an output may be any number."""
        limits = parts.source.limits
        if bool(limits.undetermined.any()):
            return None
        ends = [torch.where(limits.exact, limits.expected, end).float() for end in (limits.lower, limits.upper)]
        low, high = (_applied(self.row, end) for end in ends)
        return None if low is None or high is None else ordered_ends(low, high)


def _applied(row: Deviation[Any], m: torch.Tensor) -> torch.Tensor | None:
    changed: torch.Tensor | None = row.result(m)
    return changed


def changed_products(products: Sequence[GemmParts]) -> Iterator[ChangedProduct]:
    """Changes of the output, of each operand, and other matrices in place of an operand."""
    first = products[0]
    batches = first.source.batches if len(products) == 1 else 1
    alike = len({parts.output.shape for parts in products}) == 1
    for row in _rows(first.output.shape, batches, alike=alike):
        yield ChangedProduct(replace(row, sentence=row.sentence.format(of="the output")))
    for side, name in _SIDES.items():
        for row in _rows(getattr(first, side).shape, 1, alike=alike):
            if row.cause.startswith("rows-"):  # rows of an operand are rows or columns of the output
                continue
            yield ChangedProduct(replace(row, sentence=row.sentence.format(of=name)), side)
    if len(products) > 1:
        return
    matrices = {name: matrix for name, matrix in first.source.others().items() if matrix.dim() == 2}
    for other, matrix in matrices.items():
        for phrase, m in ((other, matrix), (f"{other}, transposed", matrix.T)):
            for side, name in _SIDES.items():
                if m.shape == torch.Size(getattr(first, side).shape):
                    row = replace(OPERAND.bound(phrase, name), change=partial(_other, m.double()))
                    yield ChangedProduct(row, side, replaces=True)


def _other(other: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return other


def _rows(shape: Sequence[int], batches: int, *, alike: bool) -> Iterator[Deviation[Extents]]:
    """Changes of a matrix of this shape. `alike`: whether every product has this shape, so that parts have numbers."""
    for row in rows_of(MATRIX_CHANGES, Extents(shape[0], shape[1], batches)):
        if alike or "-zero:" not in row.cause:
            yield row
