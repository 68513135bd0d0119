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

_STEPS = {"x": "the matrix", "blocks": "the matrix of block amaxes", "factors": "the matrix of scales of the elements"}
"""Steps of a replay, and their matrices in sentences."""
OF_EVERY_STEP = frozenset(row.cause for row in PLACE_CHANGES)
"""Causes of these changes. They count only if no other deviation gives the bytes, such as `nibbles-swapped`."""


def changed_step_deviations(matrix: KernelMatrix) -> Iterator[QuantizeDeviation]:
    """Rows and columns of another place, in x, in the block amaxes and in the scales that the elements take."""
    plain = Replay(matrix)
    if matrix.subject.recipe.whole:
        return
    for step, noun in _STEPS.items():
        shape = getattr(plain, step).shape
        for row in rows_of(PLACE_CHANGES, Extents(shape[0], shape[1])):
            deviation: Deviation[Any] = replace(
                row, step=step, sentence=row.sentence.format(of=noun), change=partial(_of_step, row.result, step),
                stages=frozenset(), optional_stages=frozenset(), row_local=False,
            )  # fmt: skip
            yield deviation


def _of_step(change: Callable[[torch.Tensor], torch.Tensor], step: str, replay: Replay) -> torch.Tensor:
    return change(getattr(replay, step))
