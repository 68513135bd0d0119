"""A bench: every task timed beside its ceilings, its first result judged, and the rows of the table made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from narrowgauge.harness.backends.backend import place
from narrowgauge.harness.tools.bench.interleave import QUICK_ROUNDS, ROUNDS, Times, interleaved, launched
from narrowgauge.harness.tools.bench.judge import Verdict
from narrowgauge.harness.tools.bench.operations import COPY, MATMUL, Inputs, Prepared, prepare
from narrowgauge.harness.tools.bench.peers import Notes, peers
from narrowgauge.harness.tools.bench.row import ERROR, OURS, RIGHT, WRONG, Row, hold
from narrowgauge.harness.tools.bench.tasks import LAUNCH, Task
from narrowgauge.native import ops as native

_SECONDS = 0.2
"""Of all rounds of one thing, about: what takes longer has fewer rounds."""
_SMALL = 128
"""Rows and columns of what is launched to see what a launch costs."""
_LIBRARY = "x + x of torch"


@dataclass
class Bench:
    """What a bench found."""

    rows: list[Row] = field(default_factory=list)
    notes: Notes = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether something of ours was judged, and nothing is wrong. Peers are judged beside it."""
        ours = [row for row in self.rows if row.ours]
        return any(row.verdict == RIGHT for row in ours) and not any(row.red for row in ours)


def measure(
    tasks: Sequence[Task],
    device_name: str,
    *,
    quick: bool = False,
    compiling: bool = False,
    launches: bool = True,
    on_task: Callable[[str], None] = lambda name: None,
) -> Bench:
    """Time and judge the tasks; `on_task` hears of each before it begins. A task that raises is a red row."""
    device = torch.device(device_name)
    bench, inputs = Bench(), Inputs(device)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    for task in tasks:
        on_task(task.id)
        try:
            bench.rows += _measured(task, inputs, bench.notes, rounds, compiling=compiling)
        except Exception as error:
            words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place(error)}"
            bench.rows.append(_row(task, OURS, device, verdict=ERROR, message=words))
    if launches:
        on_task(LAUNCH)
        bench.rows += _launches(inputs, rounds)
    for row in bench.rows:
        hold(row)
    return bench


def _row(task: Task, who: str, device: torch.device, **columns: object) -> Row:
    plain = {"dtype": "bf16", **columns}
    return Row(task.operation, task.recipe, task.variant, task.size, who=who, device=device.type, **plain)  # type: ignore[arg-type]


def _measured(task: Task, inputs: Inputs, notes: Notes, rounds: int, *, compiling: bool) -> list[Row]:
    ready = prepare(task, inputs)
    ready.peers = peers(task, inputs, notes, compiling=compiling)
    calls = {**ready.ceilings, **ready.calls, **{peer.name: peer.calls for peer in ready.peers}}
    times, results = interleaved(calls, inputs.device, rounds=rounds, seconds=_SECONDS)
    judges = {OURS: ready.judge, **{peer.name: peer.judge for peer in ready.peers}}
    moved = ready.moved(results[OURS])
    rows = []
    for who, time in times.items():
        row = _row(
            task, who, inputs.device, dtype=ready.dtype, copies=len(calls[who]), elements=ready.elements,
            flop=ready.flop, moved=ready.copied if who == COPY else moved,
        )  # fmt: skip
        _write(row, time)
        _compare(row, times, ready)
        if who in judges:
            _judge(row, judges[who](results[who]))
        rows.append(row)
    return rows


def _write(row: Row, time: Times) -> None:
    row.seconds, row.seconds_min, row.seconds_max = time.median, min(time.rounds), max(time.rounds)
    row.seconds_q1, row.seconds_q3 = time.quartiles
    row.rounds, row.calls = len(time.rounds), time.calls


def _compare(row: Row, times: dict[str, Times], ready: Prepared) -> None:
    """Write the ratios of a row: to its ceilings, and to the reference."""
    assert row.seconds is not None
    if row.who in ready.ceilings:
        return
    row.ceiling, *others = ready.ceilings
    ceiling = times[row.ceiling].median
    if row.ceiling == MATMUL:
        row.ceiling_rate = ready.flop / ceiling
        row.share = ceiling / row.seconds
    else:
        row.ceiling_rate = ready.copied / ceiling
        row.share = row.moved / row.seconds / row.ceiling_rate
    if others:  # which does the same work, or moves as many bytes
        (row.second_ceiling,) = others
        row.second_share = times[row.second_ceiling].median / row.seconds
    row.speedup = times["reference"].median / row.seconds


def _judge(row: Row, verdict: Verdict) -> None:
    row.compared, row.mismatches, row.message = verdict.compared, verdict.mismatches, verdict.sentence
    row.judged = verdict.by
    row.verdict = WRONG if verdict.sentence else RIGHT if verdict.compared else ERROR
    if row.verdict == ERROR:
        row.message = "nothing was compared"


def _launches(inputs: Inputs, rounds: int) -> list[Row]:
    """What a call costs whose work is next to nothing, beside a call of torch's own."""
    x = inputs.another((_SMALL, _SMALL))
    amax = native.amax(x)
    q = native.quantize(x, "nvfp4")
    calls = {
        ("quantize", "amax given", OURS): lambda: native.quantize(x, "nvfp4", amax=amax),
        ("quantize", "", OURS): lambda: native.quantize(x, "nvfp4"),
        ("dequantize", "", OURS): lambda: native.dequantize(q, torch.bfloat16),
        ("gemm", "", OURS): lambda: native.gemm(q, q, out_dtype=torch.bfloat16),
        ("add", "", _LIBRARY): lambda: x + x,
    }
    found = {key: launched(call, inputs.device, rounds=rounds) for key, call in calls.items()}
    library = next(time.median for (_, _, who), time in found.items() if who == _LIBRARY)
    rows = []
    for (door, what, who), time in found.items():
        variant = ", ".join(filter(None, (door, what)))
        recipe = "" if who == _LIBRARY else "nvfp4"
        row = _row(Task(LAUNCH, recipe, variant, (_SMALL, _SMALL)), who, inputs.device)
        _write(row, time)
        if who != _LIBRARY:
            row.ceiling, row.share = _LIBRARY, library / time.median
        rows.append(row)
    return rows
