"""The tasks that wait for a process: in their order, but for those that are judged on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.memory import KEPT, needed
from harness.turns import AT_ONCE
from harness.work import home_of, work
from harness.worker import Task

LANES = 3 * AT_ONCE
"""Tasks that are judged on a GPU at once: those that have a turn, and those that make inputs and digests. The other
processes judge small ones on the CPU."""


class Queue:
    """Tasks, of which few are judged on a GPU at once, the largest first: they take longest, and nothing waits for
    them at the end. None is begun beside others with which it would not fit into memory."""

    def __init__(self, tasks: Iterable[Task], device: str, gpus: int = 1) -> None:
        self._device, self._gpus = device, gpus
        self.room: int | None = None
        """Bytes of memory that all have together, of each GPU or of the machine, where that is known."""
        self._small: list[Task] = []
        self._large: list[Task] = []
        for task in tasks:
            (self._large if self._on_gpu(task) else self._small).append(task)
        self._small.reverse()
        self._large.sort(key=lambda task: work(task.case))

    def __bool__(self) -> bool:
        return bool(self._small or self._large)

    def take(self, running: Sequence[Task] = ()) -> Task | None:
        """The next task beside those that run; None where there is none, or all that are left wait for one of those."""
        if self._large and sum(map(self._on_gpu, running)) < LANES * self._gpus:
            for place in range(len(self._large) - 1, -1, -1):
                if self._fits(self._large[place], running):
                    return self._large.pop(place)
        for place in range(len(self._small) - 1, -1, -1):
            if self._fits(self._small[place], running):
                return self._small.pop(place)
        return None

    def _fits(self, task: Task, running: Sequence[Task]) -> bool:
        """Whether it fits beside those that run. Where nothing runs it may try: it says itself that it does not."""
        if self.room is None or (need := needed(task.case)) < KEPT:
            return True
        beside = [needed(other.case) for other in running if self._on_gpu(other) == self._on_gpu(task)]
        return not beside or need + sum(beside) <= self.room * (self._gpus if self._on_gpu(task) else 1)

    def put_back(self, task: Task) -> None:
        """Make it the next again."""
        (self._large if self._on_gpu(task) else self._small).append(task)

    def _on_gpu(self, task: Task) -> bool:
        return home_of(task.case, self._device) == "cuda"
