"""Which task is next: few tasks on a GPU at once, the largest first, within the memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.cost import home_of
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running import queue
from narrowgauge.harness.running.pool import is_spared
from narrowgauge.harness.running.queue import Queue, firsts
from narrowgauge.harness.running.worker import Task

LANES = 3


@pytest.fixture(autouse=True)
def lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three on a GPU."""
    monkeypatch.setattr(queue, "LANES", LANES)


def task(side: int, recipe: str = "nvfp4") -> Task:
    return Task(case_from_labels("quantize", recipe, (side, 4096), "bf16", "normal"), 0)


def sides(tasks: list[Task | None]) -> list[int]:
    return [one.case.shape[0] for one in tasks if one]


SMALLS = [task(3), task(1), task(2), task(4)]
LARGES = [task(5000), task(7000), task(6000), task(9000), task(8000)]


def test_on_a_cpu_small_tasks_are_first_and_in_their_order() -> None:
    waiting = Queue([LARGES[0], *SMALLS, LARGES[3]], "cpu")
    assert sides([waiting.take() for _ in range(7)]) == [3, 1, 2, 4, 5000, 9000]
    assert not waiting
    waiting = Queue([LARGES[0], task(6000, "mxfp4"), SMALLS[0]], "cpu")
    assert sides([waiting.take() for _ in range(3)]) == [3, 6000, 5000]  # each recipe has its places


def test_few_are_judged_on_a_gpu_at_once() -> None:
    waiting = Queue([*SMALLS, *LARGES], "cuda")
    first = [waiting.take(), waiting.take()]
    assert sorted(sides(first)) == [1, 4]
    running = []
    for _ in range(4):
        running.append(waiting.take(running))
    assert sides(running) == [9000, 8000, 7000, 3]
    assert waiting.take(running[1:]).case.shape[0] == 6000
    left = [waiting.take(LARGES[:LANES]) for _ in range(3)]
    assert sides(left) == [2]  # large tasks wait for the running tasks
    assert [one.first for one in (*first, *running, left[0])] == [True] * 2 + [False] * 5
    assert left[-1] is None
    assert waiting


def test_a_worker_is_spared_if_enough_others_judge_on_its_gpu() -> None:
    workers = [SimpleNamespace(gpu=gpu, judges_on_gpu=judges) for gpu, judges in [("0", True)] * 3 + [("1", True)] * 2]
    new = [SimpleNamespace(gpu=gpu, judges_on_gpu=False) for gpu in "01"]
    assert [is_spared(worker, [*workers, *new]) for worker in (*new, workers[0])] == [True, False, False]


def test_a_spared_process_takes_small_tasks_first() -> None:
    waiting = Queue([*SMALLS, *LARGES[:2]], "cuda")
    assert sides([waiting.take(spared=True) for _ in range(6)]) == [1, 4, 3, 2, 7000, 5000]


def test_what_would_not_fit_beside_others_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "KEPT", task(4).case.memory)
    for device in ("cpu", "cuda"):
        waiting = Queue([task(9000), task(6000), task(5000), task(1, "mxfp4")], device)
        waiting.room = task(15000).case.memory
        kernels = waiting.take() if device == "cuda" else None
        first = waiting.take()
        second = waiting.take([first])
        assert sides([first, second]) == [9000, 6000]
        assert sides([kernels or waiting.take([first, second])]) == [1]
        assert waiting.take([first, second]) is None
        assert waiting
        assert sides([waiting.take([first])]) == [5000]


def test_what_died_with_its_process_is_the_next_again() -> None:
    waiting = Queue([*SMALLS, *LARGES], "cuda")
    kernels = waiting.take()
    waiting.take()
    for one in (SMALLS[0], LARGES[0], kernels):
        waiting.put_back(one)
    assert waiting.take() == kernels
    assert waiting.take() == LARGES[0]
    assert waiting.take(LARGES[:LANES]) == SMALLS[0]


def test_small_cases_of_a_gpu_are_judged_on_the_cpu() -> None:
    rows = Case.small // 4096
    assert [home_of(task(side).case, "cuda") for side in (1, rows - 1, rows)] == ["cpu", "cpu", "cuda"]
    assert home_of(task(rows).case, "cpu") == "cpu"


def test_small_cases_of_every_kind_come_first_on_a_gpu() -> None:
    def case(operation: str, name: str, side: int, *flags: str) -> Task:
        return Task(
            case_from_labels(
                operation, name, (side, 64, 64)[: 3 if operation == "gemm" else 2], "bf16", "normal", flags
            ),
            0,
        )

    alike = [case("gemm", "nvfp4", side, "tn", *more) for side in (64, 16, 32) for more in ((), ("bias",))]
    others = [
        case("gemm", "nvfp4", 16, "nn"), case("gemm", "mxfp8-e4m3", 16, "tn"), case("quantize", "nvfp4", 16, "both"),
        Task(case_from_labels("linear", "MXFP8BlockScaling", (1, 16, 64, 64), "bf16", "normal"), 0),
    ]  # fmt: skip
    found = firsts([*alike, *others])
    assert {task.case for task in found} == {one.case for one in (alike[2], alike[1], *others[:3])}
    rounds = [task.case.recipe_label for task in reversed(found)]
    assert sorted(rounds[:2]) == ["mxfp8-e4m3", "nvfp4"]  # of each recipe one, before a second of any
    waiting = Queue([*alike, *others], "cuda")
    taken = [waiting.take() for _ in range(10)]
    assert taken[:5] == [replace(task, first=True) for task in reversed(found)]
    assert sorted(taken[5:], key=hash) == sorted((set(alike) | set(others)) - set(found), key=hash)
    assert not waiting
