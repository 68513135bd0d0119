"""Changes of any matrix: left out, exchanged, shifted, repeated, transposed or rounded.

Every step takes matrices and gives one, so these rows apply to the operands and to the result of every formula and of
every product. A vector is a matrix with a single row; a tensor with more dimensions has its last as columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.diagnosis.quantize.elements.roundings import NARROW
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of

_TAILS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Rows or columns at the end that a loop may leave out, and widths of whole tiles behind which a rest is left out."""


@dataclass(frozen=True)
class Extents:
    """Extents of a matrix."""

    rows: int
    columns: int
    batches: int = 1
    """Batches, sections or heads that the rows are divided into. 1: a single one, or an unknown number."""

    @property
    def batch(self) -> int:
        """Rows of a batch; 0 if the batches have different numbers of rows or there is one alone."""
        return 0 if self.batches == 1 or self.rows % self.batches else self.rows // self.batches


Places = Callable[[torch.Tensor, int], torch.Tensor]
"""Function from the numbers of the rows, or columns, and their number to the numbers of the rows in their place."""
_PLACES: dict[str, Places] = {
    "the next one": lambda i, n: (i + 1).clamp(max=n - 1),
    "the next one, and the last is the first": lambda i, n: (i + 1) % n,
    "the previous one": lambda i, n: (i - 1).clamp(min=0),
    "the previous one, and the first is the last": lambda i, n: (i - 1) % n,
    "the first one": lambda i, n: torch.zeros_like(i),
    "the other one of its pair": lambda i, n: torch.where((i ^ 1) < n, i ^ 1, i),
    "the one at the same distance from the other end": lambda i, n: n - 1 - i,
    "that of the other half": lambda i, n: (i + n // 2) % n,
    "that of the first half": lambda i, n: i % max(1, n // 2),
}


_LAST: dict[str, Places] = {
    "the one before it": lambda i, n: i.clamp(max=n - 2),
    "the first one": lambda i, n: i % (n - 1),
}


def _row_places(of: Extents) -> dict[str, Places]:
    if not of.batch:
        return _PLACES
    batch = of.batch
    return _PLACES | {
        "that of the first batch": lambda i, n: i % batch,
        "that of the next batch": lambda i, n: (i + batch) % n,
        "that of the last batch": lambda i, n: n - batch + i % batch,
    }


def _ranges(extent: int, batch: int = 0) -> dict[str, tuple[int, int]]:
    """Parts that a loop may leave out, by the numbers of their ends: `60 to 63`."""
    ends = [(extent - tail, extent) for tail in _TAILS] + [(extent // tile * tile, extent) for tile in _TAILS]
    ends += [(0, 1), (1, extent), (0, extent // 2), (extent // 2, extent)]
    for first in range(0, extent, batch) if batch else ():
        ends += [(first, first + batch), (0, first), (first, extent)]
    parts = [(first, end) for first, end in ends if 0 <= first < end <= extent and end - first < extent]
    return {str(first) if end == first + 1 else f"{first} to {end - 1}": (first, end) for first, end in parts}


def _placed(axis: int, places: Places, m: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(m.shape[axis], device=m.device)
    return m.index_select(axis, places(numbers, len(numbers)))


def _without(axis: int, part: tuple[int, int], m: torch.Tensor) -> torch.Tensor:
    changed = m.clone()
    changed.narrow(axis, part[0], part[1] - part[0]).zero_()
    return changed


def _transposed(m: torch.Tensor) -> torch.Tensor | None:
    return None if min(m.shape) < 2 else m.T.reshape(m.shape)


def _blocks_transposed(m: torch.Tensor) -> torch.Tensor | None:
    """The rows as square matrices, each matrix transposed."""
    rows, columns = m.shape
    return (
        None if columns < 2 or rows % columns or rows == columns else m.view(-1, columns, columns).mT.reshape(m.shape)
    )


def _rounded(dtype: torch.dtype, m: torch.Tensor) -> torch.Tensor:
    return m.to(dtype).to(m.dtype)


PLACE_CHANGES: tuple[Deviation[Extents], ...] = (
    Deviation("rows-of-other", "every row of {of} is {0}", "matrix", lambda places, m: _placed(0, places, m),
              _row_places, lambda of: of.rows > 1),
    Deviation("columns-of-other", "every column of {of} is {0}", "matrix", lambda places, m: _placed(1, places, m),
              _PLACES, lambda of: of.columns > 1),
    Deviation("last-row-of-other", "the last row of {of} is {0}", "matrix", lambda places, m: _placed(0, places, m),
              _LAST, lambda of: of.rows > 1),
    Deviation("last-column-of-other", "the last column of {of} is {0}", "matrix",
              lambda places, m: _placed(1, places, m), _LAST, lambda of: of.columns > 1),
)  # fmt: skip
"""Rows and columns of another place. The sentence has {of} for the matrix."""
LEFT_OUT: tuple[Deviation[Extents], ...] = (
    Deviation("rows-zero:{}", "{of} is taken to be 0 in rows {0}", "matrix", lambda part, m: _without(0, part, m),
              lambda of: _ranges(of.rows, of.batch)),
    Deviation("columns-zero:{}", "{of} is taken to be 0 in columns {0}", "matrix",
              lambda part, m: _without(1, part, m), lambda of: _ranges(of.columns)),
)  # fmt: skip
"""Rows and columns that a loop leaves out."""
MATRIX_CHANGES: tuple[Deviation[Extents], ...] = (
    Deviation("matrix-zero", "{of} is taken to be 0", "matrix", torch.zeros_like),
    Deviation("matrix-negated", "{of} has the other sign", "matrix", torch.neg),
    *LEFT_OUT,
    *PLACE_CHANGES,
    Deviation("matrix-transposed", "{of} is read as if it were transposed", "matrix", _transposed),
    Deviation("matrices-transposed", "each square matrix of {of} is read as if it were transposed", "matrix",
              _blocks_transposed),
    Deviation("matrix-through-{}", "{of} is rounded to {}", "matrix", _rounded, NARROW),
)  # fmt: skip
"""Changes of an operand, or of a result. The sentence has {of} for the matrix."""
OPERAND_CHANGES: tuple[Deviation[Extents], ...] = (
    Deviation("matrix-one", "{of} is taken to be 1", "matrix", torch.ones_like),
    Deviation("matrix-squared", "{of} is applied twice", "matrix", lambda m: m * m),
    Deviation("matrix-without-signs", "{of} is without its signs", "matrix", torch.abs),
    *MATRIX_CHANGES,
)
"""Changes of an operand of a formula."""


def changed_matrices(
    table: tuple[Deviation[Extents], ...], m: torch.Tensor, name: str, batches: int = 1
) -> Iterator[tuple[Deviation[Extents], torch.Tensor]]:
    """Every row of a table with an effect on `m`, with the sentence for the matrix `name`, and the changed matrix."""
    matrix = m.reshape(-1, m.shape[-1]) if m.dim() else m.reshape(1, 1)
    if not m.numel():
        return
    for row in rows_of(table, Extents(matrix.shape[0], matrix.shape[1], batches)):
        changed = row.result(matrix)
        if changed is not None and not equal_bits(changed, matrix):
            yield replace(row, sentence=row.sentence.format(of=name)), changed.reshape(m.shape)
