"""Changes that every matrix of a quantizer has: rows, columns or blocks of another place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.diagnosis.formulas.matrix_changes import PLACE_CHANGES, Extents
from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of

_STEPS = {
    "used amax": "the vector of amaxes",
    "x": "the matrix",
    "blocks": "the matrix of block amaxes",
    "factors": "the matrix of scales of the elements",
}
"""Steps of a replay, and their matrices in sentences."""
OF_EVERY_STEP = frozenset(row.cause for row in PLACE_CHANGES)
"""Causes of these changes. They count only if no other deviation gives the bytes, such as `nibbles-swapped`."""


def changed_step_deviations(matrix: KernelMatrix, wrong: torch.Tensor | None) -> Iterator[QuantizeDeviation]:
    """Rows and columns of another place, in x, in the amaxes and in the scales that the elements take: all of them, or
    the rows of `_some_rows`."""
    plain = Replay(matrix)
    if matrix.subject.recipe.whole:
        return
    some = _some_rows(wrong)
    for step, noun in _STEPS.items():
        value = getattr(plain, _NAMES.get(step, step))
        if value is None or value.shape[0] == 1:
            continue
        for row in rows_of(PLACE_CHANGES, Extents(value.shape[0], value.shape[1] if value.dim() > 1 else 1)):
            sentence = row.sentence.format(of=noun)
            deviation: Deviation[Any] = replace(
                row, step=step, sentence=sentence, change=partial(_of_step, row.result, step),
                stages=frozenset(), optional_stages=frozenset(), row_local=False,
            )  # fmt: skip
            yield deviation
            if some is not None and sentence.startswith(_EVERY):
                place, rows = some
                sentence = f"{place} of{sentence.removeprefix(_EVERY)}"
                yield replace(deviation, sentence=sentence, change=partial(_of_rows, row.result, step, rows))


_NAMES = {"used amax": "amax"}
"""Attributes of a replay with another name than their step."""
_EVERY = "every row of"


def _some_rows(wrong: torch.Tensor | None) -> tuple[str, slice] | None:
    """The wrong row, int64 (1,), or one row of each period, the largest power of two, that has all wrong rows (n,)."""
    if wrong is None:
        return None
    first = int(wrong[0])
    if len(wrong) == 1:
        return f"row {first}", slice(first, first + 1)
    for period in (1 << bit for bit in range(7, 0, -1)):
        phase = first % period
        if bool((wrong % period == phase).all()):
            return f"every {period}{'nd' if period == 2 else 'th'} row, from row {phase} on,", slice(
                phase, None, period
            )
    return None


def _of_step(change: Callable[[torch.Tensor], torch.Tensor], step: str, replay: Replay) -> torch.Tensor:
    return change(getattr(replay, _NAMES.get(step, step)))


def _of_rows(change: Callable[[torch.Tensor], torch.Tensor], step: str, rows: slice, replay: Replay) -> torch.Tensor:
    """The change in some rows alone."""
    value: torch.Tensor = getattr(replay, _NAMES.get(step, step))
    changed = value.clone()
    changed[rows] = change(value)[rows]
    return changed
