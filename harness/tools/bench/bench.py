"""A bench: time every task and its ceilings, judge its first result, and make the rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from narrowgauge.harness.backends.backend import error_location
from narrowgauge.harness.operations.timing.judge_outputs import Verdict
from narrowgauge.harness.operations.timing.operation_bench import (
    COMPILED,
    COPY,
    MATMUL,
    BenchInputs,
    BenchTask,
    Peer,
    PreparedTask,
    nbytes,
)
from narrowgauge.harness.tools.bench.bench_row import ERROR, NATIVE, RIGHT, WRONG, BenchRow
from narrowgauge.harness.tools.bench.interleave import QUICK_ROUNDS, ROUNDS, Times, time_interleaved, time_launches
from narrowgauge.harness.tools.bench.silence_stderr import silence_stderr
from narrowgauge.harness.tools.bench.tasks import LAUNCH, bench_of, benches

_SECONDS = 0.2
"""Approximate seconds of all rounds of a call. Slow calls have fewer rounds."""
_SMALL = 128
"""Rows and columns of the matrix used to measure the cost of a launch."""
_LIBRARY = "x + x of torch"

Notes = dict[str, str]
"""Why a peer is not measured, by its name."""


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
    prepared = bench_of(task).prepare(task, inputs)
    peers = callable_peers(task, inputs, notes, compiling=compiling)
    calls = {**prepared.ceilings, NATIVE: prepared.native, "reference": prepared.reference}
    calls |= {name: peer.calls for name, peer in peers.items()}
    times, results = time_interleaved(calls, inputs.device, rounds=rounds, seconds=_SECONDS)
    judges = {NATIVE: prepared.judge, **{name: peer.judge for name, peer in peers.items()}}
    moved_bytes = prepared.read + nbytes(results[NATIVE])
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


def callable_peers(task: BenchTask, inputs: BenchInputs, notes: Notes, *, compiling: bool) -> dict[str, Peer]:
    """Peers that support the task and can be called, by name. Other peers get a note."""
    available = {}
    if not compiling:
        notes[COMPILED] = "not measured; --compile does, and takes a minute or two"
    for name, make in bench_of(task).peers.items():
        if name == COMPILED and not compiling:
            continue
        try:
            with silence_stderr():  # torchao prints which of its extensions do not fit, torch.compile graph breaks
                peer = make(task, inputs)
                if peer is not None:
                    peer.calls[0]()  # compiles, or raises for an unsupported case
                    available[name] = peer
        except ImportError as error:
            notes[name] = f"not installed ({error})"
        except Exception as error:  # another version of the library, or an unsupported device
            message = " ".join(str(error).split())[:200]
            notes[f"{name}, {task.recipe}"] = f"raises {type(error).__name__}: {message}"
    return available


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
    shape = (_SMALL, _SMALL)
    x = inputs.new_matrix(shape)
    calls = {(NATIVE, *key): call for bench in benches() for key, call in bench.launches(x).items()}
    calls[_LIBRARY, "", "add"] = lambda: x + x
    times = {key: time_launches(call, inputs.device, rounds=rounds) for key, call in calls.items()}
    library = times[_LIBRARY, "", "add"].median
    rows = []
    for (who, recipe, variant), time in times.items():
        row = _row(BenchTask(LAUNCH, recipe, variant, shape), who, inputs.device)
        _write(row, time)
        if who != _LIBRARY:
            row.ceiling, row.share = _LIBRARY, library / time.median
        rows.append(row)
    return rows
