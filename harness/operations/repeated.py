"""Running a backend several times, guarded: rule 5 of tolerance.md."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch

from harness.backend import Backend
from harness.checks.stage import StageResult
from harness.finding import spaced
from harness.guard import POISON, Guard, unwritten

T = TypeVar("T")
Tensors = dict[str, torch.Tensor | None]


def timed(device: torch.device, call: Callable[[], T]) -> tuple[T, float]:
    """What `call` gives, and its seconds, the device waited for: a time is a time, a fault shows where it happened."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def repeated(
    backend: Backend, device: torch.device, inputs: Tensors, call: Callable[[Tensors], Tensors]
) -> tuple[Tensors, list[StageResult], float]:
    """Run `call` once per variation of the backend, on guarded copies of `inputs`.

    Gives the first run's outputs, the stages `memory` (guard zones intact, inputs unchanged) and `repeat` (the same
    bytes every time, every element written), and the seconds of the fastest run.
    """
    runs: list[Tensors] = []
    memory: list[str] = []
    seconds = float("inf")
    variations = backend.variations(device)
    for number, (name, context) in enumerate(variations.items()):
        guard = Guard(POISON[number % len(POISON)])
        given = {key: None if t is None else guard.guarded(t, key) for key, t in inputs.items()}
        with context() or nullcontext(), guard:
            outputs, elapsed = timed(device, partial(call, given))
        seconds = min(seconds, elapsed)
        memory += [f"{text} ({name})" for text in guard.violations()]
        runs.append({key: None if t is None else t.detach().clone() for key, t in outputs.items()})
    protected = StageResult("memory", "guard", compared=len(inputs) * len(runs), mismatches=len(memory))
    if memory:
        more = f"; and {len(memory) - 3} more" if len(memory) > 3 else ""
        protected.sentence = "; ".join(memory[:3]) + more
    return runs[0], [protected, _agree(runs, list(variations))], seconds


def _agree(runs: list[Tensors], names: list[str]) -> StageResult:
    result = StageResult("repeat", "repeat", compared=sum(t.numel() for t in runs[0].values() if t is not None))
    for number, run in enumerate(runs[1:], 1):
        for key, first in runs[0].items():
            other = run[key]
            if first is None or other is None:
                if (first is None) != (other is None):
                    result.mismatches += 1
                    result.sentence = result.sentence or f"{key} is given in one of {names[0]} and {names[number]} only"
                continue
            different = _different(first, other)
            if not different:
                continue
            result.mismatches += different
            missing = unwritten(first, other, (POISON[0], POISON[number % len(POISON)]))
            if not result.sentence:
                of = f"{spaced(first.numel())} elements of {key}"
                result.sentence = (
                    f"{spaced(missing)} of {of} were never written"
                    if missing
                    else f"{spaced(different)} of {of} differ between {names[0]} and {names[number]}"
                )
    return result


def _different(a: torch.Tensor, b: torch.Tensor) -> int:
    rows = (t.contiguous().view(torch.uint8).view(t.numel(), t.element_size()) for t in (a, b))
    x, y = rows
    return 0 if torch.equal(x, y) else int((x != y).any(1).sum())
