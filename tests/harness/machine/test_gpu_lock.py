"""Lock of a GPU: a limited number of processes hold it at a time, and no process waits for ever."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from narrowgauge.harness.machine import gpu_lock
from narrowgauge.harness.machine.gpu_lock import JUDGE_QUEUE, LAUNCH_QUEUE, LockQueue, lock_gpu


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the locks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    return tmp_path


def hold(folder, name, queue, held, done):
    """Hold the lock until told to end."""
    tempfile.tempdir = folder
    os.environ["CUDA_VISIBLE_DEVICES"] = name
    with lock_gpu("cuda", queue):
        held.send(True)
        done.recv()


@pytest.fixture
def holder(folder: Path):
    """Starts a process that holds the lock of a named GPU; the process ends with the test, or when it is killed."""
    context, started = multiprocessing.get_context("spawn"), []

    def start(name: str = "GPU-1", queue: LockQueue = LAUNCH_QUEUE):
        (held, theirs), (done, read) = context.Pipe(False), context.Pipe(False)[::-1]
        process = context.Process(target=hold, args=(str(folder), name, queue, theirs, read), daemon=True)
        process.start()
        started.append((process, done))
        assert held.recv()
        return process

    yield start
    for process, _ in started:
        process.kill()
        process.join()


def had(monkeypatch: pytest.MonkeyPatch, queue: LockQueue = LAUNCH_QUEUE) -> bool:
    """Whether this process gets a turn without patience."""
    result = []
    wait = gpu_lock._acquire
    monkeypatch.setattr(gpu_lock, "_acquire", lambda gpu, queue: result.append(wait(gpu, queue)) or result[-1])
    with lock_gpu("cuda", replace(queue, timeout=0.0)):
        assert gpu_lock._lock_depth == 1
    monkeypatch.setattr(gpu_lock, "_acquire", wait)
    return result[0] is not None


def test_so_many_have_a_turn_and_the_next_when_one_dies(holder, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [holder() for _ in range(LAUNCH_QUEUE.holders - 1)]
    assert had(monkeypatch)
    assert had(monkeypatch)  # the lock was released
    others.append(holder())
    assert not had(monkeypatch)  # and went on without the lock
    others[0].kill()
    others[0].join()
    assert had(monkeypatch)


def test_out_of_turn_nobody_is_waited_for_and_nobody_waits(holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lock, "_acquire", lambda gpu, queue: pytest.fail("it waits"))
    with gpu_lock.without_gpu_lock():
        for _ in range(2):
            with lock_gpu("cuda"):
                assert gpu_lock._lock_depth == 1
    monkeypatch.undo()
    assert not gpu_lock._lock_disabled


def test_a_visit_waits_for_none_that_is_judged(holder, monkeypatch: pytest.MonkeyPatch) -> None:
    holder(queue=JUDGE_QUEUE)
    assert not had(monkeypatch, JUDGE_QUEUE)
    assert had(monkeypatch)


def test_every_gpu_has_its_own(holder, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(LAUNCH_QUEUE.holders):
        holder("GPU-2")
    assert had(monkeypatch)


def test_where_nothing_can_be_written_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert gpu_lock._acquire("GPU-1", LAUNCH_QUEUE) is None
