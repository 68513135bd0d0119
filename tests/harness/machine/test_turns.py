"""Turns on a GPU: so many processes have one at a time, and nobody waits for ever."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from narrowgauge.harness.machine import gpu_lock
from narrowgauge.harness.machine.gpu_lock import JUDGED, VISITS, Line, turn


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the locks are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    return tmp_path


def hold(folder, name, line, held, done):
    """Have a turn until told to end it."""
    tempfile.tempdir = folder
    os.environ["CUDA_VISIBLE_DEVICES"] = name
    with turn("cuda", line):
        held.send(True)
        done.recv()


@pytest.fixture
def holder(folder: Path):
    """Starts a process that has a turn on the GPU of a name; it ends with the test, or when it is killed."""
    context, started = multiprocessing.get_context("spawn"), []

    def start(name: str = "GPU-1", line: Line = VISITS):
        (held, theirs), (done, read) = context.Pipe(False), context.Pipe(False)[::-1]
        process = context.Process(target=hold, args=(str(folder), name, line, theirs, read), daemon=True)
        process.start()
        started.append((process, done))
        assert held.recv()
        return process

    yield start
    for process, _ in started:
        process.kill()
        process.join()


def had(monkeypatch: pytest.MonkeyPatch, line: Line = VISITS) -> bool:
    """Whether this process gets a turn without patience."""
    found = []
    wait = gpu_lock._wait
    monkeypatch.setattr(gpu_lock, "_wait", lambda gpu, line: found.append(wait(gpu, line)) or found[-1])
    with turn("cuda", replace(line, patience=0.0)):
        assert gpu_lock._held == 1
    monkeypatch.setattr(gpu_lock, "_wait", wait)
    return found[0] is not None


def test_so_many_have_a_turn_and_the_next_when_one_dies(holder, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [holder() for _ in range(VISITS.at_once - 1)]
    assert had(monkeypatch)
    assert had(monkeypatch)  # it was given back
    others.append(holder())
    assert not had(monkeypatch)  # and went on without it
    others[0].kill()
    others[0].join()
    assert had(monkeypatch)


def test_out_of_turn_nobody_is_waited_for_and_nobody_waits(holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lock, "_wait", lambda gpu, line: pytest.fail("it waits"))
    with gpu_lock.out_of_turn():
        for _ in range(2):
            with turn("cuda"):
                assert gpu_lock._held == 1
    monkeypatch.undo()
    assert not gpu_lock._out_of_turn


def test_a_visit_waits_for_none_that_is_judged(holder, monkeypatch: pytest.MonkeyPatch) -> None:
    holder(line=JUDGED)
    assert not had(monkeypatch, JUDGED)
    assert had(monkeypatch)


def test_every_gpu_has_its_own(holder, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(VISITS.at_once):
        holder("GPU-2")
    assert had(monkeypatch)


def test_a_turn_within_a_turn_is_the_same(folder: Path) -> None:
    with turn("cuda"):
        files = sorted(folder.iterdir())
        with turn("cuda"), turn("cuda"):
            assert gpu_lock._held == 1
        assert sorted(folder.iterdir()) == files
    assert gpu_lock._held == 0


def test_there_are_none_without_a_gpu(folder: Path) -> None:
    with turn("cpu"):
        assert gpu_lock._held == 0
    assert list(folder.iterdir()) == []


def test_a_turn_ends_where_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(VISITS.at_once + 1):
        with pytest.raises(KeyError), turn("cuda"):
            raise KeyError
    assert had(monkeypatch)


def test_where_nothing_can_be_written_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert gpu_lock._wait("GPU-1", VISITS) is None
