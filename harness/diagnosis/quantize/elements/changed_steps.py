"""Changes that every matrix of a quantizer has: rows, columns or blocks of another place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from narrowgauge.harness.diagnosis.formulas.matrix_changes import PLACE_CHANGES, Extents
from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.operations.stages.deviation import rows_of

_STEPS = {"x": "the matrix", "blocks": "the matrix of block amaxes", "factors": "the matrix of scales of the elements"}
"""Steps of a replay, and their matrices in sentences."""
_KNOWN = {
    ("x", "rows-of-other"): ("the first is the last", "the last is the first"),
    ("factors", "columns-of-other"): ("the next one", "the previous one"),
}
"""Words of places that `element_deviations` has already, as `rows-rolled` and `scales-of-next-block`."""


def changed_step_deviations(matrix: KernelMatrix) -> Iterator[QuantizeDeviation]:
    """Rows and columns of another place, in x, in the block amaxes and in the scales that the elements take."""
    plain = Replay(matrix)
    if matrix.subject.recipe.whole:
        return
    for step, noun in _STEPS.items():
        shape = getattr(plain, step).shape
        for row in rows_of(PLACE_CHANGES, Extents(shape[0], shape[1])):
            if any(words in row.sentence for words in _KNOWN.get((step, row.cause), ())):
                continue
            yield replace(
                row, step=step, sentence=row.sentence.format(of=noun), change=partial(_of_step, row.result, step),
                stages=frozenset(), optional_stages=frozenset(), row_local=False,
            )  # fmt: skip


def _of_step(change: object, step: str, replay: Replay) -> torch.Tensor:
    changed: torch.Tensor = change(getattr(replay, step))  # type: ignore[operator]
    return changed
