"""The tasks that wait for a process: in their order, but for those that are judged on a GPU."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.cost import KEPT, home_of
from narrowgauge.harness.running.worker import Task

LANES = 10
"""Tasks that are judged on a GPU at once: the one that has its turn, and those that make inputs and digests, which
take a CPU five times as long. The other processes judge small ones on the CPU: of a twelfth of the full tier, with 6 of
20 processes, they had none left while two in five of the large ones waited. It limits runs with -n above 10."""


GPU_JUDGES = 3
"""Processes of a GPU that judge on it while small tasks are left. The first task of a process on a GPU takes a second
of a core for the start of CUDA and the first calls of torch's kernels."""


LONG = 1 << 20
"""Work of a case, in elements, above which a case runs after smaller cases of its operation and recipe."""


class Queue:
    """Tasks, of which few are judged on a GPU at once, the largest first: they take longest, and nothing waits for
    them at the end. None is begun beside others with which it would not fit into memory.

    On a GPU small ones of every kind come before all others (`firsts`), and wait for no turn: a kernel that is compiled
    within a turn, for some seconds, keeps the GPU from all processes, and so they compile side by side."""

    def __init__(self, tasks: Iterable[Task], device: str, gpus: int = 1) -> None:
        self._device, self._gpus = device, gpus
        self.room: int | None = None
        """Bytes of memory that all have together, of each GPU or of the machine, where that is known."""
        self._small: list[Task] = []
        self._large: list[Task] = []
        for task in tasks:
            (self._large if self.on_gpu(task) else self._small).append(task)
        self._small = _small_first(self._small)
        self._first = [replace(task, first=True) for task in firsts(self._small)] if device == "cuda" else []
        first = {id(task.case) for task in self._first}
        self._small = [task for task in reversed(self._small) if id(task.case) not in first]
        self._large.sort(key=lambda task: task.case.work)

    def __bool__(self) -> bool:
        return bool(self._first or self._small or self._large)

    def take(self, running: Sequence[Task] = (), *, spared: bool = False) -> Task | None:
        """The next task beside the running tasks; None if no task is left, or all tasks left wait for a running task.

        `spared`: the process has judged nothing on its GPU, and begins only if there is no small task for it."""
        large = self._large if sum(map(self.on_gpu, running)) < LANES * self._gpus else []
        for tasks in (self._first, self._small, large) if spared else (self._first, large, self._small):
            for place in range(len(tasks) - 1, -1, -1):
                if self._fits(tasks[place], running):
                    return tasks.pop(place)
        return None

    def _fits(self, task: Task, running: Sequence[Task]) -> bool:
        """Whether it fits beside those that run. Where nothing runs it may try: it says itself that it does not."""
        if self.room is None or (need := task.case.memory) < KEPT:
            return True
        beside = [other.case.memory for other in running if self.on_gpu(other) == self.on_gpu(task)]
        return not beside or need + sum(beside) <= self.room * (self._gpus if self.on_gpu(task) else 1)

    def put_back(self, task: Task) -> None:
        """Make it the next again."""
        (self._first if task.first else self._large if self.on_gpu(task) else self._small).append(task)

    def on_gpu(self, task: Task) -> bool:
        """Whether a task is judged on a GPU."""
        return home_of(task.case, self._device) == "cuda"


def _small_first(tasks: Sequence[Task]) -> list[Task]:
    """The tasks with those of an operation and recipe in this order: first the small ones, then the others.

    The tasks of an operation and recipe keep their places among other tasks. The diagnosis of a small failing case
    tries all deviations within its time, and the causes that it finds are tried first for the larger cases.
    """
    alike: dict[tuple[str, str], list[Task]] = {}
    for task in tasks:
        alike.setdefault((task.case.operation, task.case.recipe_label), []).append(task)
    ordered = {kind: iter(sorted(members, key=_is_long)) for kind, members in alike.items()}
    return [next(ordered[task.case.operation, task.case.recipe_label]) for task in tasks]


def _is_long(task: Task) -> bool:
    return task.case.work > LONG


def firsts(tasks: Sequence[Task]) -> list[Task]:
    """Of each kind of operation and flags the smallest task, and of each recipe of an operation the largest: between
    them they launch about every kernel. Not modules, whose kernels are those of operations.

    Mixed, so that few processes want the same kernel at a time: of each recipe one, then of each a second, in the order
    of a digest of their ids.
    """
    alike: dict[tuple[object, ...], Task] = {}
    for task in sorted((task for task in tasks if not task.case.composed), key=lambda task: task.case.work):
        alike.setdefault(_kind(task.case), task)
        alike[task.case.operation, task.case.recipe_label] = task
    seen: Counter[str] = Counter()
    order = []
    for task in sorted({id(task): task for task in alike.values()}.values(), key=_mixed):
        seen[task.case.recipe_label] += 1
        order.append((seen[task.case.recipe_label], _mixed(task), task))
    return [task for *_, task in sorted(order, key=lambda one: one[:2], reverse=True)]


def _kind(case: Case) -> tuple[object, ...]:
    """What decides which kernels are launched, as far as a case says it: numbers, and what is added, do not."""
    flags = [flag for flag in case.flags if ":" not in flag and flag not in ("accumulate", "bias")]
    return case.operation, case.recipe_label, *flags, "of a kind"


def _mixed(task: Task) -> str:
    return hashlib.sha256(task.case.id.encode()).hexdigest()
