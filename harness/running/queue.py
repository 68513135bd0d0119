"""The scheduler of a run: waiting tasks, and the choice of the next task for a free worker.

The next task is the first that fits into memory beside the running tasks, in this order of lists:

    first   on a GPU: small tasks with every kind of kernel: kernels compile early and side by side
    large   tasks judged on a GPU, the largest first, because they take longest; at most `LANES` at a time per GPU
    small   tasks judged on the CPU, in the order of the run; small cases of an operation and recipe come first

A worker that has not yet used its GPU takes small tasks before large tasks (`spared`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.cost import KEPT, home_of
from narrowgauge.harness.running.worker import Task

LANES = 10
"""Largest number of tasks judged on a GPU at a time: a task on the GPU, and tasks in their CPU part (inputs and
digests), which takes five times as long. The remaining workers judge small tasks. The limit acts in runs with -n above
10. With 6 tasks of 20 workers, on a twelfth of the full tier, the small tasks ended while 2 of 5 large tasks waited."""


GPU_JUDGES = 3
"""Number of workers of a GPU that judge on the GPU while small tasks are left. The first task of a worker on a GPU
takes a core-second for the start of CUDA and the first calls of torch's kernels."""


LONG = 1 << 20
"""Work of a case, in elements, above which a case runs after smaller cases of its operation and recipe."""


class Queue:
    """The waiting tasks, in the lists of the module's docstring.

    Tasks of the list `first` do not take the lock of the GPU: a kernel compiled under the lock, for seconds, would keep
    the GPU from all workers."""

    def __init__(self, tasks: Iterable[Task], device: str, gpus: int = 1) -> None:
        self._device, self._gpus = device, gpus
        self.room: int | None = None
        """Bytes of memory for all tasks together, of a GPU or of the machine; None if unknown."""
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
        """The next task beside the running tasks; None if no task is left, or all tasks left wait for memory.

        `spared`: the worker has not yet used its GPU, and takes a large task only without a small task."""
        large = self._large if sum(map(self.on_gpu, running)) < LANES * self._gpus else []
        for tasks in (self._first, self._small, large) if spared else (self._first, large, self._small):
            for place in range(len(tasks) - 1, -1, -1):
                if self._fits(tasks[place], running):
                    return tasks.pop(place)
        return None

    def _fits(self, task: Task, running: Sequence[Task]) -> bool:
        """Whether a task fits into memory beside the running tasks. A task alone may always try: the judge reports a
        shortage."""
        if self.room is None or (need := task.case.memory) < KEPT:
            return True
        beside = [other.case.memory for other in running if self.on_gpu(other) == self.on_gpu(task)]
        return not beside or need + sum(beside) <= self.room * (self._gpus if self.on_gpu(task) else 1)

    def put_back(self, task: Task) -> None:
        """Put a task back in front of its list."""
        (self._first if task.first else self._large if self.on_gpu(task) else self._small).append(task)

    def on_gpu(self, task: Task) -> bool:
        """Whether a task is judged on a GPU."""
        return home_of(task.case, self._device) == "cuda"


def _small_first(tasks: Sequence[Task]) -> list[Task]:
    """The tasks, small tasks of an operation and recipe before its long tasks.

    An operation and recipe keeps its places among all tasks. The diagnosis of a small failing case tries all deviations
    within its time, and its causes are tried first for larger cases.
    """
    alike: dict[tuple[str, str], list[Task]] = {}
    for task in tasks:
        alike.setdefault((task.case.operation, task.case.recipe_label), []).append(task)
    ordered = {kind: iter(sorted(members, key=_is_long)) for kind, members in alike.items()}
    return [next(ordered[task.case.operation, task.case.recipe_label]) for task in tasks]


def _is_long(task: Task) -> bool:
    return task.case.work > LONG


def firsts(tasks: Sequence[Task]) -> list[Task]:
    """The smallest task of every kind of operation and flags, and the largest task of every recipe of an operation:
    together they launch about every kernel. Modules are left out: they launch the kernels of operations.

    The order is mixed, so that few workers need the same kernel at a time: a task per recipe, then a second per recipe,
    and so on, in the order of a digest of the ids.
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
    """The keys of a case with an influence on the launched kernels: not numbers, accumulation or bias."""
    flags = [flag for flag in case.flags if ":" not in flag and flag not in ("accumulate", "bias")]
    return case.operation, case.recipe_label, *flags, "of a kind"


def _mixed(task: Task) -> str:
    return hashlib.sha256(task.case.id.encode()).hexdigest()
