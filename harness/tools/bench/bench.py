"""A bench: time every task and its ceilings, judge its first result, and make the rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from narrowgauge.harness.backends.backend import error_location
from narrowgauge.harness.tools.bench.bench_row import ERROR, NATIVE, RIGHT, WRONG, BenchRow
from narrowgauge.harness.tools.bench.interleave import QUICK_ROUNDS, ROUNDS, Times, time_interleaved, time_launches
from narrowgauge.harness.tools.bench.judge_outputs import Verdict
from narrowgauge.harness.tools.bench.operations import COPY, MATMUL, BenchInputs, PreparedTask, prepare
from narrowgauge.harness.tools.bench.peer_libraries import Notes, callable_peers
from narrowgauge.harness.tools.bench.tasks import LAUNCH, BenchTask
from narrowgauge.native import ops as native

_SECONDS = 0.2
"""Approximate seconds of all rounds of a call. Slow calls have fewer rounds."""
_SMALL = 128
"""Rows and columns of the matrix used to measure the cost of a launch."""
_LIBRARY = "x + x of torch"


@dataclass
class Bench:
    """Results of a bench."""

    rows: list[BenchRow] = field(default_factory=list)
    notes: Notes = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether a native output passed, and no native output failed. Verdicts of peers do not count."""
        native_rows = [row for row in self.rows if row.is_native]
        return any(row.verdict == RIGHT for row in native_rows) and not any(row.failed for row in native_rows)


def measure(
    tasks: Sequence[BenchTask],
    device_name: str,
    *,
    quick: bool = False,
    compiling: bool = False,
    launches: bool = True,
    on_task: Callable[[str], None] = lambda name: None,
) -> Bench:
    """Time and judge the tasks. `on_task` is called with each id before the task begins. A task that raises is a failed
    row."""
    device = torch.device(device_name)
    bench, inputs = Bench(), BenchInputs(device)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    for task in tasks:
        on_task(task.id)
        try:
            bench.rows += _measured(task, inputs, bench.notes, rounds, compiling=compiling)
        except Exception as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{error_location(error)}"
            bench.rows.append(_row(task, NATIVE, device, verdict=ERROR, message=message))
    if launches:
        on_task(LAUNCH)
        bench.rows += _launches(inputs, rounds)
    return bench


def _row(task: BenchTask, who: str, device: torch.device, **columns: object) -> BenchRow:
    defaults = {"dtype": "bf16", **columns}
    return BenchRow(task.operation, task.recipe, task.variant, task.size, who=who, device=device.type, **defaults)  # type: ignore[arg-type]


def _measured(task: BenchTask, inputs: BenchInputs, notes: Notes, rounds: int, *, compiling: bool) -> list[BenchRow]:
    prepared = prepare(task, inputs)
    prepared.peers = callable_peers(task, inputs, notes, compiling=compiling)
    calls = {**prepared.ceilings, **prepared.calls, **{peer.name: peer.calls for peer in prepared.peers}}
    times, results = time_interleaved(calls, inputs.device, rounds=rounds, seconds=_SECONDS)
    judges = {NATIVE: prepared.judge, **{peer.name: peer.judge for peer in prepared.peers}}
    moved_bytes = prepared.moved(results[NATIVE])
    rows = []
    for who, time in times.items():
        row = _row(
            task, who, inputs.device, dtype=prepared.dtype, copies=len(calls[who]), elements=prepared.elements,
            flop=prepared.flop, moved=prepared.copied if who == COPY else moved_bytes,
        )  # fmt: skip
        _write(row, time)
        _compare(row, times, prepared)
        if who in judges:
            _judge(row, judges[who](results[who]))
        rows.append(row)
    return rows


def _write(row: BenchRow, time: Times) -> None:
    row.seconds, row.seconds_min, row.seconds_max = time.median, min(time.rounds), max(time.rounds)
    row.seconds_q1, row.seconds_q3 = time.quartiles
    row.rounds, row.calls = len(time.rounds), time.calls


def _compare(row: BenchRow, times: dict[str, Times], prepared: PreparedTask) -> None:
    """Write the ratios of a row to its ceilings and to the reference."""
    assert row.seconds is not None
    if row.who in prepared.ceilings:
        return
    row.ceiling, *others = prepared.ceilings
    ceiling = times[row.ceiling].median
    if row.ceiling == MATMUL:
        row.ceiling_rate = prepared.flop / ceiling
        row.share = ceiling / row.seconds
    else:
        row.ceiling_rate = prepared.copied / ceiling
        row.share = row.moved / row.seconds / row.ceiling_rate
    if others:  # a ceiling with the same work, or with as many bytes
        (row.second_ceiling,) = others
        row.second_share = times[row.second_ceiling].median / row.seconds
    row.speedup = times["reference"].median / row.seconds


def _judge(row: BenchRow, verdict: Verdict) -> None:
    row.compared, row.mismatches, row.message = verdict.compared, verdict.mismatches, verdict.sentence
    row.judged = verdict.rule
    row.verdict = WRONG if verdict.sentence else RIGHT if verdict.compared else ERROR
    if row.verdict == ERROR:
        row.message = "nothing was compared"


def _launches(inputs: BenchInputs, rounds: int) -> list[BenchRow]:
    """Cost of a call with next to no work, beside a call of torch."""
    x = inputs.new_matrix((_SMALL, _SMALL))
    amax = native.amax(x)
    q = native.quantize(x, "nvfp4")
    calls = {
        ("quantize", "amax given", NATIVE): lambda: native.quantize(x, "nvfp4", amax=amax),
        ("quantize", "", NATIVE): lambda: native.quantize(x, "nvfp4"),
        ("dequantize", "", NATIVE): lambda: native.dequantize(q, torch.bfloat16),
        ("gemm", "", NATIVE): lambda: native.gemm(q, q, out_dtype=torch.bfloat16),
        ("add", "", _LIBRARY): lambda: x + x,
    }
    times = {key: time_launches(call, inputs.device, rounds=rounds) for key, call in calls.items()}
    library = next(time.median for (_, _, who), time in times.items() if who == _LIBRARY)
    rows = []
    for (operation, detail, who), time in times.items():
        variant = ", ".join(filter(None, (operation, detail)))
        recipe = "" if who == _LIBRARY else "nvfp4"
        row = _row(BenchTask(LAUNCH, recipe, variant, (_SMALL, _SMALL)), who, inputs.device)
        _write(row, time)
        if who != _LIBRARY:
            row.ceiling, row.share = _LIBRARY, library / time.median
        rows.append(row)
    return rows
