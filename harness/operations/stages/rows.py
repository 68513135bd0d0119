"""Stages that compare two runs of a kernel, so that no reference is needed.

Rows by themselves: a row has the same bytes in another place, beside other rows, and alone. Operations whose rows are
declared independent have this stage. Memory that a kernel changes in part: other bytes before the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.guard import POISON
from narrowgauge.harness.backends.guarded_memory import element_bytes
from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.repeated import Tensors

ROWS = "rows"
"""Name of the stage."""
DEPENDENT = "rows-dependent"
"""The cause."""
PREFILL = "prefill"
"""Name of the stage of memory with other bytes before the run."""
PREFILL_DEPENDENT = "prefill-dependent"
"""Its cause."""
_ALONE = (1, 2, 7, 128)
"""Numbers of rows that run alone: a single one, and numbers at which kernels take another path."""
_PADDING = 3
"""Rows behind the others, as in a buffer that is larger than its content."""


def rows_stage(
    backend: Backend, by_row: Tensors, others: Tensors, whole: Tensors, run: Callable[[Tensors], Tensors]
) -> StageResult:
    """Run rows again among others, and compare each row with that of the run of all rows.

    by_row: inputs (M, …), contiguous. others: further inputs. whole: results (M, …) of all rows, by name. run: from
    inputs to results of these names. A kernel that refuses a number of rows raises as `Backend.call` does.
    """
    count = next(iter(by_row.values())).shape[0]
    result = StageResult(ROWS, "repeat", compared=0)
    for phrase, rows, padding in _arrangements(count):
        given = {name: _padded(tensor[rows.to(tensor.device)], padding) for name, tensor in by_row.items()}
        prepared = backend.host.prepare(given | others, next(iter(by_row.values())).device, POISON[0])
        with backend.host.lock(), prepared.running(0) as passed:
            found = run(passed)
        found = {name: tensor[: len(rows)] for name, tensor in prepared.keep(found).items()}
        for name, tensor in found.items():
            before = whole[name][rows.to(whole[name].device)]
            wrong = (element_bytes(tensor) != element_bytes(before)).view(len(rows), -1).any(1)
            result.compared += len(rows)
            result.mismatches += int(wrong.sum())
            if bool(wrong.any()) and not result.sentence:
                first = int(rows[wrong.nonzero()[0, 0].cpu()])
                result.causes = [DEPENDENT]
                result.sentence = (
                    f"{format_count(int(wrong.sum()))} of {format_count(len(rows))} rows of {name} have other bytes "
                    f"{phrase}; the first is row {first}"
                )
    return result


def _arrangements(count: int) -> Iterator[tuple[str, torch.Tensor, float | None]]:
    """What is done with the rows in words, the rows of each run, and the number in the rows behind them."""
    every = torch.arange(count)
    yield "in reverse order", every.flip(0), None
    for number, words in ((0.0, "zeros"), (torch.nan, "NaN"), (torch.inf, "the largest number")):
        yield f"before rows of {words}", every, number
    for alone in _ALONE:
        if alone < count:
            start = (count - alone) // 2
            yield f"with M = {alone}", every[start : start + alone], None


def _padded(rows: torch.Tensor, number: float | None) -> torch.Tensor:
    """The rows with some rows of a number behind them; infinity stands for the largest finite number."""
    if number is None:
        return rows.contiguous()
    if not rows.is_floating_point():
        number = 0.0  # an index
    value = torch.finfo(rows.dtype).max if number == torch.inf else number
    return torch.cat([rows, rows.new_full((_PADDING, *rows.shape[1:]), value)])


def prefill_stage(
    backend: Backend, memory: Tensors, others: Tensors, first: Tensors, written: Tensors,
    run: Callable[[Tensors], Tensors],
) -> StageResult:  # fmt: skip
    """Run again with the inverted bytes of the inputs `memory`, which the kernel changes in part.

    others: further inputs. first: results of the first run, each behind the memory. written: int8 of their leading
    axes, 1 where the kernel writes, 0 where bytes stay, −1 where nothing is compared. run: from inputs to results.
    """
    result = StageResult(PREFILL, "repeat", compared=0)
    inverted = {name: (~tensor.view(torch.uint8)).view(tensor.dtype) for name, tensor in memory.items()}
    prepared = backend.host.prepare(inverted | others, next(iter(memory.values())).device, POISON[0])
    with backend.host.lock(), prepared.running(0) as passed:
        found = run(passed)
    for name, tensor in prepared.keep(found).items():
        axes = written[name].dim()
        one, other = (element_bytes(t.contiguous()).view(*t.shape[:axes], -1) for t in (first[name], tensor))
        mask = written[name].unsqueeze(-1).to(one.device)
        wrong = (mask >= 0) & (other != torch.where(mask == 1, one, ~one))
        result.compared += one.numel()
        result.mismatches += int(wrong.count_nonzero())
        if bool(wrong.any()) and not result.sentence:
            place = wrong.any(-1).nonzero()[0].tolist()
            keeps = "are written" if int(mask[tuple(place)]) == 1 else "stay"
            result.causes = [PREFILL_DEPENDENT]
            result.sentence = (
                f"{format_count(int(wrong.count_nonzero()))} of {format_count(one.numel())} bytes of {name} follow the "
                f"bytes before the call in another way than bytes that {keeps}; first in {place}"
            )
    return result
