"""Turns on a GPU: of the processes that share one, few use it at a time.

A GPU runs the kernels of one process at a time, for a millisecond or two, and each that waits for a result waits for
all others: 15 processes judge fewer cases an hour than one. A turn makes nothing right or wrong: who has waited long
goes on without it, and a process that dies has none.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.harness.machine.processors import VISIBLE
from narrowgauge.harness.machine.timing import OTHER, spending


@dataclass(frozen=True)
class Line:
    """Those who wait for the same turns."""

    name: str
    at_once: int
    """Processes that have one at a time."""
    patience: float
    """Seconds that a process waits for its turn: whoever compiles a kernel in it holds nobody up for ever."""


JUDGED = Line("judged", 1, 30.0)
"""Cases that are judged on the GPU. Measured on an H200: a grouped linear layer, 40 000 launches, takes 0.8 s alone,
3.4 s as one of two, 7.2 s as one of four; a product (4096, 512, 3072) 0.1 s alone, 0.3 s as one of two."""
VISITS = Line("visits", 2, 0.5)
"""Cases that are judged on the CPU, whose kernels alone run on the GPU, for some milliseconds: they wait for none of
the others, which take a hundred times as long."""
_LOOK = 1e-3
_held = 0
_said: str | None = None
_out_of_turn = False


@contextmanager
def turn(device: str, line: Line = VISITS) -> Iterator[None]:
    """Within the context this process has a turn on its GPU, and what it asked of it is done when it ends.

    A turn within a turn is the same one. Without a GPU there are none. What the GPU says at the end is kept (`said`).
    """
    global _held  # noqa: PLW0603
    if device != "cuda" or _held:
        yield
        return
    file = None
    if not _out_of_turn:
        with spending(OTHER):
            file = _wait(os.environ.get(VISIBLE, "all"), line)
    _held += 1
    try:
        yield
        _finish()
    finally:
        _held -= 1
        if file is not None:
            os.close(file)


@contextmanager
def out_of_turn() -> Iterator[None]:
    """Within the context this process waits for nobody, and nobody for it: for what may compile kernels."""
    global _out_of_turn  # noqa: PLW0603
    _out_of_turn = True
    try:
        yield
    finally:
        _out_of_turn = False


def _finish() -> None:
    import torch

    global _said  # noqa: PLW0603
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _said = _said or gpu_error()


def said() -> str | None:
    """What the GPU said at the end of the turns since this was asked last; None where there was none. See `gpu_error`.

    It is asked there since a process that asks by itself waits for another turn.
    """
    global _said
    heard, _said = _said, None
    return heard


def gpu_error() -> str:
    """What the GPU says of everything so far, by waiting for it and by one small kernel; nothing where all is well."""
    import torch

    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def _wait(gpu: str, line: Line) -> int | None:
    """The open file whose lock is the turn; None where there was none in time."""
    name = "".join(letter if letter.isalnum() else "-" for letter in gpu)
    until = time.monotonic() + line.patience
    files = []
    try:
        for number in range(line.at_once):
            path = Path(tempfile.gettempdir()) / f"narrowgauge-{os.getuid()}-{name}-{line.name}-{number}"
            files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        while True:
            for file in files:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                files.remove(file)
                return file
            if time.monotonic() > until:
                return None
            time.sleep(_LOOK)
    except OSError:  # no such folder, no such right: then there are no turns
        return None
    finally:
        for file in files:
            os.close(file)
