"""Which task is next: few that are judged on a GPU at once, the largest first, and none that would not fit."""

from __future__ import annotations

import pytest

from harness import queue
from harness.case import Case
from harness.memory import needed
from harness.queue import Queue
from harness.work import SMALL, home_of
from harness.worker import Task

LANES = 3


@pytest.fixture(autouse=True)
def lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three on a GPU."""
    monkeypatch.setattr(queue, "LANES", LANES)


def task(side: int) -> Task:
    return Task(Case("quantize", "nvfp4", (side, 4096), "bf16", "normal"), 0)


def sides(tasks: list[Task | None]) -> list[int]:
    return [one.case.shape[0] for one in tasks if one]


SMALLS = [task(3), task(1), task(2)]
LARGES = [task(5000), task(7000), task(6000), task(9000), task(8000)]


def test_on_a_cpu_tasks_are_in_their_order() -> None:
    waiting = Queue([LARGES[0], *SMALLS, LARGES[3]], "cpu")
    assert sides([waiting.take() for _ in range(6)]) == [5000, 3, 1, 2, 9000]
    assert not waiting


def test_few_are_judged_on_a_gpu_at_once() -> None:
    waiting = Queue([*SMALLS, *LARGES], "cuda")
    running = []
    for _ in range(5):
        running.append(waiting.take(running))
    assert sides(running) == [9000, 8000, 7000, 3, 1]
    assert waiting.take(running[1:]).case.shape[0] == 6000
    left = [waiting.take(LARGES[:LANES]) for _ in range(3)]
    assert sides(left) == [2]  # the others wait for those that run
    assert left[-1] is None
    assert waiting


def test_every_gpu_has_its_lanes() -> None:
    waiting = Queue(LARGES * 2, "cuda", gpus=2)
    running = []
    while (one := waiting.take(running)) is not None:
        running.append(one)
    assert len(running) == 2 * LANES


def test_what_would_not_fit_beside_others_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "KEPT", needed(task(4).case))
    for device in ("cpu", "cuda"):
        waiting = Queue([task(9000), task(6000), task(5000), task(1)], device)
        waiting.room = needed(task(15000).case)
        first = waiting.take()
        second = waiting.take([first])
        assert sides([first, second]) == [9000, 6000]
        assert sides([waiting.take([first, second])]) == [1]
        assert waiting.take([first, second]) is None
        assert waiting
        assert sides([waiting.take([first])]) == [5000]


def test_what_never_fits_is_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "KEPT", 0)
    waiting = Queue(LARGES[:2], "cuda")
    waiting.room = 1
    first = waiting.take()
    assert sides([first]) == [7000]
    assert waiting.take([first]) is None
    assert sides([waiting.take()]) == [5000]


def test_what_died_with_its_process_is_the_next_again() -> None:
    waiting = Queue([*SMALLS, *LARGES], "cuda")
    for one in (SMALLS[1], LARGES[0]):
        waiting.put_back(one)
    assert waiting.take() == LARGES[0]
    assert waiting.take(LARGES[:LANES]) == SMALLS[1]


def test_small_cases_of_a_gpu_are_judged_on_the_cpu() -> None:
    rows = SMALL // 4096
    assert [home_of(task(side).case, "cuda") for side in (1, rows - 1, rows)] == ["cpu", "cpu", "cuda"]
    assert home_of(task(rows).case, "cpu") == "cpu"
