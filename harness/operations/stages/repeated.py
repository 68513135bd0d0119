"""Running a backend several times, guarded: docs/tolerance.md#memory-and-repetition."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import pairwise

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.concurrency import GRAPH, SEQUENTIAL, STREAMS, THREADS
from narrowgauge.harness.backends.guard import POISON, unwritten
from narrowgauge.harness.backends.guarded_memory import element_bytes
from narrowgauge.harness.backends.host import PreparedRun
from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.stage import StageResult

RACE = "order-of-threads"
"""The cause where the variation alone changes bytes."""

OVERWRITTEN = "overwrites-earlier-result"
"""The cause of a first result that a later call changes."""

REPEAT_CAUSES = {
    SEQUENTIAL: "wrong-after-many-calls", THREADS: "concurrent-threads", STREAMS: "concurrent-streams",
    GRAPH: "captured-inputs",
}  # fmt: skip
"""Causes of further calls with other bytes, by the kind of the calls."""
_KINDS = {
    SEQUENTIAL: "on the same inputs give other bytes",
    THREADS: "from two threads at once give other bytes than one after the other",
    STREAMS: "on two CUDA streams at once give other bytes than one after the other",
    GRAPH: "replayed from a CUDA graph on changed inputs give other bytes than plain calls",
}
Tensors = dict[str, torch.Tensor]
"""Arguments of a call, or its results, by name."""
Arguments = Mapping[str, torch.Tensor | None]
"""All arguments that an operation has, by name; None: not passed."""


def present(arguments: Arguments) -> Tensors:
    """The arguments that are passed."""
    return {name: tensor for name, tensor in arguments.items() if tensor is not None}


def repeated(
    backend: Backend,
    home: torch.device,
    inputs: Arguments,
    call: Callable[[Tensors], Tensors],
    drawn: Collection[str] = (),
    *,
    free: Mapping[str, torch.Tensor] | None = None,
    runs: list[Tensors] | None = None,
    composed: bool = False,
) -> tuple[Tensors, list[StageResult], float]:
    """Run `call` once per variation of the backend, on guarded copies of the `inputs` that are passed.

    `composed`: the call is made of kernels that have cases of their own, and runs in the first and the last variation.
    A `brief` backend runs the first variation alone.

    If the case has further calls (`Backend.repeats`), they run behind, and their bytes must be those of the first run;
    if these calls are concurrent, further calls run on different inputs at the same time.

    The inputs are on the device `home`, the copies on the device of the backend; the results are copied to `home`.
    Results named in `drawn` depend on random bits of the backend: every call may give other bytes, and the stage
    `repeat` leaves these results out. `free`: bool masks of elements of results that a kernel need not write, which
    the stage leaves out too. `runs`: list that gets the results of every run.

    Returns the results of the first run, the stages `memory` (guard zones, inputs and first results unchanged) and
    `repeat` (the same bytes in every run, every element written), and the seconds of the fastest run. If two runs
    disagree, up to three more runs tell whether the poison, the variation or neither changes the bytes.
    """
    device, passed = backend.device or home, present(inputs)
    every = list(enumerate(backend.variations(device)))
    names = dict(every[:1] if backend.brief else [every[0], every[-1]] if composed else every)

    def prepared(number: int) -> PreparedRun:
        return backend.host.prepare(passed, home, _poison(number))

    def run(variation: int, prepared: PreparedRun) -> Tensors:
        with prepared.running(variation) as given:
            outputs = call(given)
        return prepared.keep(outputs)

    def again(variation: int, number: int) -> Tensors:
        return _compared(run(variation, prepared(number)), drawn, free or {})

    runs = [] if runs is None else runs
    finished: list[PreparedRun] = []
    protected = StageResult("memory", "guard", compared=len(inputs) * len(names))
    memory: list[str] = []
    seconds = float("inf")
    # The CPU makes the copies before this process takes the lock of the GPU.
    ready = map(prepared, names)
    with_copies = ready if device.type == home.type else iter(list(ready))
    with backend.host.lock():
        for (number, name), one in zip(names.items(), with_copies, strict=True):
            runs.append(run(number, one))
            finished.append(one)
            seconds = min(seconds, one.seconds)
            for cause, texts in zip(("writes-outside", "changes-its-input"), one.violations(), strict=True):
                memory += [f"{text} ({name})" for text in texts]
                if texts and cause not in protected.causes:
                    protected.causes.append(cause)
        if backend.host.reused and "results" not in backend.declares:
            overwritten = _overwritten(backend, home, passed, call)
            memory += [f"the first result of {name} is overwritten by a later call" for name in overwritten]
            protected.causes += [OVERWRITTEN] if overwritten else []
        repeat = _agree([_compared(outputs, drawn, free or {}) for outputs in runs], names, again)
        if backend.repeats and not drawn:
            pairs = [(prepared(0), finished[0])]
            if backend.concurrency != SEQUENTIAL:
                for other in _other_inputs(passed, backend.concurrency):
                    alone, beside = (backend.host.prepare(other, home, _poison(0)) for _ in range(2))
                    run(0, alone)
                    pairs.append((beside, alone))
            _add_repeats(repeat, backend, pairs, call)
    protected.mismatches = len(memory)
    if memory:
        more = f"; and {len(memory) - 3} more" if len(memory) > 3 else ""
        protected.sentence = "; ".join(memory[:3]) + more
    return runs[0], [protected, repeat], seconds


def _overwritten(
    backend: Backend, home: torch.device, inputs: Tensors, call: Callable[[Tensors], Tensors]
) -> list[str]:
    """Methods with a first result changed by a later call. A method may give the same memory again for equal inputs, so
    the call has other inputs. Empty if it refuses them."""
    changed = dict(inputs)
    for name, tensor in inputs.items():
        if tensor.numel() and (tensor.is_floating_point() or tensor.element_size() == 1):
            # The signs of numbers, and of codes, whose first bit is a sign: shapes and magnitudes stay.
            codes = tensor.clone().view(torch.uint8) ^ 0x80 if tensor.element_size() == 1 else None
            changed[name] = -tensor if codes is None else codes.view(tensor.dtype)
            break
    with suppress(BackendError, Unsupported), backend.host.prepare(changed, home, _poison(0)).running(0) as given:
        call(given)
    return backend.host.overwritten()


def _other_inputs(inputs: Tensors, concurrency: str) -> list[Tensors]:
    """Inputs of equal shapes and different values: rows in reverse order; for a graph also a last row of NaN, as
    rows of a padding may hold."""
    reverse = {name: tensor.flip(0) if tensor.dim() else tensor.clone() for name, tensor in inputs.items()}
    if concurrency != GRAPH:
        return [reverse]
    spoilt = {name: tensor.clone() for name, tensor in inputs.items()}
    for tensor in spoilt.values():
        if tensor.dim() > 1 and tensor.is_floating_point():
            tensor[-1:] = torch.nan
    return [spoilt, reverse]


def _add_repeats(
    result: StageResult,
    backend: Backend,
    pairs: list[tuple[PreparedRun, PreparedRun]],
    call: Callable[[Tensors], Tensors],
) -> None:
    """Run the further calls of a case, and add to the stage `repeat` the calls that gave other bytes."""
    count, kind = backend.repeats, backend.concurrency
    try:
        wrong = [number for numbers in backend.host.repeat(kind, count, pairs, call) for number in numbers]
    except BackendError as error:
        raise BackendError(f"repeated on the same inputs, it fails: {error}") from error
    total = count * len(pairs)
    result.compared += total
    result.mismatches += len(wrong)
    if not wrong or result.sentence:
        return
    result.causes = [REPEAT_CAUSES[kind]]
    result.sentence = f"{format_count(len(wrong))} of {format_count(total)} further calls {_KINDS[kind]}"
    if kind == SEQUENTIAL:
        steps = {later - earlier for earlier, later in pairwise(wrong)}
        period = f", one in {format_count(*steps)}" if len(steps) == 1 and steps != {1} else ""
        result.sentence += f": call {format_count(wrong[0])} first{period}"


def _compared(outputs: Tensors, drawn: Collection[str], free: Mapping[str, torch.Tensor]) -> Tensors:
    """Results of a run without those in `drawn`, and with 0 for their elements in `free`."""
    kept = {key: tensor for key, tensor in outputs.items() if key not in drawn}
    return kept | {key: kept[key].masked_fill(mask.to(kept[key].device), 0) for key, mask in free.items()}


def _poison(number: int) -> int:
    """Poison of the `number`-th run."""
    return POISON[number % len(POISON)]


def _agree(runs: list[Tensors], names: dict[int, str], again: Callable[[int, int], Tensors]) -> StageResult:
    """The stage `repeat`. If runs disagree, `again` runs a variation with the poison of a run, both by number."""
    result = StageResult("repeat", "repeat", compared=sum(t.numel() for t in runs[0].values()))
    for number, run in zip([*names][1:], runs[1:], strict=True):
        for key in dict.fromkeys([*runs[0], *run]):
            first, other = runs[0].get(key), run.get(key)
            if first is None or other is None:
                different, missing = int((first is None) != (other is None)), 0
                text = f"{key} is given in one of {names[0]} and {names[number]} only"
            else:
                different = _different(first, other)
                missing = unwritten(first, other, (_poison(0), _poison(number))) if different else 0
                of = f"{format_count(first.numel())} elements of {key}"
                text = f"{format_count(different)} of {of} differ between {names[0]} and {names[number]}"
                text = f"{format_count(missing)} of {of} were never written" if missing else text
            result.mismatches += different
            if different and not result.sentence:
                cause, why = ("never-written", "") if missing else _reason(runs[0], number, again)
                if cause == RACE and first is not None and other is not None:
                    why += f": a race, seen first in {_first_difference(first, other)}"
                result.causes, result.sentence = [cause], text + why
    return result


def _reason(first: Tensors, number: int, again: Callable[[int, int], Tensors]) -> tuple[str, str]:
    """Why the results of a variation differ from the first run: the cause, and the end of the sentence for people.

    A new run changes a single condition: nothing, the poison, the variation.
    """
    try:
        if not _equal(first, again(0, 0)):
            return "not-repeatable", ": the same run again gives other bytes"
        if not _equal(first, again(0, number)):
            return "reads-outside", ": they depend on bytes outside the inputs, or on memory that nobody wrote"
        if not _equal(first, again(number, 0)):
            return RACE, ", all else the same"
    except (BackendError, Unsupported) as error:
        return "not-repeatable", f": run again, it fails: {error}"
    return "not-repeatable", ": run again, they agree"


def _equal(one: Tensors, other: Tensors) -> bool:
    """Whether two runs gave the same bytes."""
    return one.keys() == other.keys() and not any(_different(one[key], other[key]) for key in one)


def _different(a: torch.Tensor, b: torch.Tensor) -> int:
    x, y = element_bytes(a), element_bytes(b)
    return 0 if torch.equal(x, y) else int((x != y).any(1).sum())


def _first_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """The first element that differs, and its bits in both tensors: `row 0, column 5: 0x1A and 0x00`."""
    x, y = element_bytes(a), element_bytes(b)
    index = int((x != y).any(1).nonzero()[0])
    bits = ("0x" + bytes(row[index].tolist())[::-1].hex().upper() for row in (x, y))
    place = f"row {index // a.shape[1]}, column {index % a.shape[1]}" if a.dim() == 2 else f"element {index}"
    return f"{place}: {' and '.join(bits)}"
