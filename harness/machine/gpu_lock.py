"""Lock of a shared GPU: only a few of its processes use the GPU at a time.

A GPU runs the kernels of one process at a time, for a millisecond or two, and a process waiting for a result waits for
the kernels of all processes: 15 processes judge fewer cases an hour than a single process. The lock changes no
result: after too long a wait a process goes on without the lock, and a dying process releases the lock.
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

from narrowgauge.harness.machine.processors import VISIBLE_DEVICES
from narrowgauge.harness.machine.timing import OTHER, count_seconds


@dataclass(frozen=True)
class LockQueue:
    """Queue of processes that wait for the same lock."""

    name: str
    holders: int
    """Processes that hold the lock at a time."""
    timeout: float
    """Seconds that a process waits for the lock. So a holder compiling a kernel delays the queue only for a while."""
    poll: float
    """Seconds between two attempts. With 1 ms the attempts of 14 workers took 7 % of the processor time of a run."""


JUDGE_QUEUE = LockQueue("judged", 1, 30.0, 8e-3)
"""Cases judged on the GPU. Measured on an H200: a grouped linear layer, 40 000 launches, takes 0.8 s alone, 3.4 s as
one of two processes, 7.2 s as one of four; a product (4096, 512, 3072) takes 0.1 s alone, 0.3 s as one of two."""
LAUNCH_QUEUE = LockQueue("visits", 2, 0.5, 2e-3)
"""Cases judged on the CPU: only their kernels run on the GPU, for some milliseconds. These cases do not wait for the
cases judged on the GPU, which take a hundred times as long."""
_lock_depth = 0
_lock_error: str | None = None
_lock_disabled = False


@contextmanager
def lock_gpu(device: str, queue: LockQueue = LAUNCH_QUEUE) -> Iterator[None]:
    """Hold the lock of this process's GPU within the context, and wait for its kernels at the end.

    The lock is reentrant. A CPU has no lock. Errors of the GPU are kept for `pop_gpu_error`.
    """
    global _lock_depth  # noqa: PLW0603
    if device != "cuda" or _lock_depth:
        yield
        return
    file = None
    if not _lock_disabled:
        with count_seconds(OTHER):
            file = _acquire(os.environ.get(VISIBLE_DEVICES, "all"), queue)
    _lock_depth += 1
    try:
        yield
        _wait_for_kernels()
    finally:
        _lock_depth -= 1
        if file is not None:
            os.close(file)


def needs_lock(device: str) -> bool:
    """Whether a user of the device has to take the lock: this process neither holds the lock nor uses the GPU without
    the lock."""
    return device == "cuda" and not _lock_depth and not _lock_disabled


@contextmanager
def without_gpu_lock() -> Iterator[None]:
    """Use the GPU without the lock within the context, for code that may compile kernels."""
    global _lock_disabled  # noqa: PLW0603
    _lock_disabled = True
    try:
        yield
    finally:
        _lock_disabled = False


def _wait_for_kernels() -> None:
    import torch

    global _lock_error  # noqa: PLW0603
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _lock_error = _lock_error or probe_gpu()


def pop_gpu_error() -> str | None:
    """The first error of the GPU since the last call, from the end of a locked context. None without this context.

    The GPU is probed while the lock is held (`probe_gpu`): a probe on its own would wait for the lock again.
    """
    global _lock_error
    heard, _lock_error = _lock_error, None
    return heard


def probe_gpu() -> str:
    """The error of the kernels launched so far, found by a small kernel and a synchronization, or an empty string."""
    import torch

    try:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def _acquire(gpu: str, queue: LockQueue) -> int | None:
    """The file descriptor of the lock, or None after the queue's timeout."""
    name = "".join(letter if letter.isalnum() else "-" for letter in gpu)
    deadline = time.monotonic() + queue.timeout
    files = []
    try:
        for number in range(queue.holders):
            path = Path(tempfile.gettempdir()) / f"narrowgauge-{os.getuid()}-{name}-{queue.name}-{number}"
            files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        while True:
            for file in files:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                files.remove(file)
                return file
            if time.monotonic() > deadline:
                return None
            time.sleep(queue.poll)
    except OSError:  # the folder is missing or read-only: run without locks
        return None
    finally:
        for file in files:
            os.close(file)
