"""Several trainings side by side, each in a process of its own: what ends one costs the steps that it had left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.backends.backend import BackendError
from narrowgauge.harness.backends.backend import place as location
from narrowgauge.harness.machine.processors import VISIBLE, gpu_of
from narrowgauge.harness.running.worker import ending, forkserver, prepare_process
from narrowgauge.harness.tools.train.training import Training

if TYPE_CHECKING:
    from rich.console import Console

    from narrowgauge.harness.tools.train.train import Task

RECIPES = (
    "NVFP4BlockScaling", "NVFP4BlockScaling-norht", "NVFP4BlockScaling-nosr", "NVFP4BlockScaling-no2d",
    "NVFP4BlockScaling-norht-nosr-no2d", "MXFP8BlockScaling", "Float8BlockScaling", "Float8CurrentScaling",
    "DelayedScaling",
)  # fmt: skip
"""What is trained unless recipes are named: every recipe, and each switch of NVFP4 turned off."""
NOT_BEGUN = "not begun"
"""Why a training has no step whose turn has not come."""


def tasks(recipes: Sequence[str], backend: str, device: str, *, seed: int, steps: int) -> list[Task]:
    """Under each recipe, and in high precision, the layers of the backend, judged, and those of the reference.

    Raises ValueError for a name that is no training recipe's.
    """
    from narrowgauge.harness.tools.train.model import LAYERS
    from narrowgauge.harness.tools.train.train import Task
    from narrowgauge.spec.training import training_recipe

    names = dict.fromkeys(str(training_recipe(recipe)) for recipe in recipes)
    sharing = len(names) * steps * LAYERS
    return [
        Task(recipe, layers, device, seed, steps, judged=layers == backend, sharing=sharing)
        for recipe in [*names, None]
        for layers in dict.fromkeys((backend, "reference"))
    ]


class _Process:
    """A training in its process, seen from the session."""

    def __init__(self, task: Task, workers: int, number: int) -> None:
        context: Any = multiprocessing.get_context("spawn") if task.device == "cuda" else forkserver()
        gpu = gpu_of(number, task.device)
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_main, args=(theirs, task, workers, gpu), daemon=True)
        self.process.start()
        theirs.close()
        self.number = number
        self.training = Training(task)
        self._started = time.monotonic()

    def receive(self) -> bool:
        """Take its next word: a step, or that it has ended; whether there may be another."""
        try:
            word = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            word = f"its process died ({ending(self.process.exitcode)})"
        self.training.seconds = time.monotonic() - self._started
        if isinstance(word, str):
            self.training.error = word
            return False
        self.training.steps.append(word)
        return True

    def stop(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def run_tasks(
    tasks: Sequence[Task],
    workers: int,
    on_step: Callable[[Training], None],
    on_end: Callable[[Training, list[Training]], None] = lambda training, found: None,
) -> list[Training]:
    """Train every task, `workers` at a time, the judged ones first, which take longest; in the order of the tasks.

    `on_step` is called after every step, and `on_end` with each training that has ended and all of them as they are
    then. An interrupt ends those that run, which keep their steps, and leaves the others without any.
    """
    waiting = sorted(enumerate(tasks), key=lambda item: (item[1].judged and item[1].recipe is not None, -item[0]))
    found = [Training(task, error=NOT_BEGUN) for task in tasks]
    running: dict[int, _Process] = {}
    places = list(range(workers))[::-1]
    try:
        while waiting or running:
            while waiting and places:
                place, task = waiting.pop()
                running[place] = _Process(task, workers, places.pop())
                found[place] = running[place].training
            # An interrupt between Python's last look and the wait itself is seen after it.
            ready = wait([one.connection for one in running.values()], timeout=1.0)
            for place, one in [item for item in running.items() if item[1].connection in ready]:
                if one.receive():
                    on_step(one.training)
                else:
                    one.stop()
                    places.append(one.number)
                    del running[place]
                    on_end(one.training, found)
    except KeyboardInterrupt:
        for one in running.values():
            one.training.error = "interrupted"
    finally:
        for one in running.values():
            one.stop()
    return found


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Within the context the first SIGTERM is an interrupt: what a time limit or a scheduler ends keeps what it has.

    Others do nothing: `timeout` sends two, to the process and to its group.
    """

    def interrupt(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_session(tasks: Sequence[Task], directory: Path, *, workers: int, console: Console | None = None) -> bool:
    """Train every task, print and write the report; whether all passed. Raises OSError where it cannot be written.

    The report is written after every training, and says what has not ended; a console that is no terminal gets a line
    for each that has.
    """
    from rich.console import Console as Terminal

    from narrowgauge.harness.records.environment import describe_run
    from narrowgauge.harness.tools.run_cases import progress_bar
    from narrowgauge.harness.tools.train import corpus, report

    console = console or Terminal()
    started = time.monotonic()
    first = tasks[0]
    environment = describe_run(backend=first.backend, device=first.device, seed=first.seed)
    entropy = corpus.make(first.seed).entropy
    with terminated_as_interrupted():
        with progress_bar(console) as progress:
            bar = progress.add_task("training", total=sum(task.steps for task in tasks))

            def on_step(training: Training) -> None:
                step = training.steps[-1]
                words = f"{report.name(training)}: step {len(training.steps)}, loss {step.loss:.3f}"
                progress.update(bar, advance=1, description=words)

            def on_end(training: Training, found: list[Training]) -> None:
                if not console.is_terminal:
                    console.print(report.line(training), markup=False, highlight=False, soft_wrap=True)
                report.write(found, environment, entropy, directory)

            found = run_tasks(tasks, workers, on_step, on_end)
        report.print_result(found, entropy, console)
        page = report.write(found, environment, entropy, directory)
        passed = all(one.passed(entropy) for one in found)
        words = f"{report.sentence(found, entropy)}; {time.monotonic() - started:.1f} s; report: {page}"
        console.print(words, markup=False, highlight=False, soft_wrap=True, style="" if passed else "bold red")
    return passed


def _main(connection: Connection, task: Task, workers: int, gpu: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # which a shell, or timeout, sends to the whole group
        signal.signal(number, signal.SIG_IGN)  # the session decides what it means
    if gpu:
        os.environ[VISIBLE] = gpu
    prepare_process(workers)
    from narrowgauge.harness.tools.train.train import train

    try:
        for step in train(task):
            connection.send(step)
        connection.send("")
    except BrokenPipeError:  # the session is gone
        return
    except BackendError as error:
        connection.send(str(error))
    except Exception as error:  # a result so odd that a check cannot read it costs its own training
        connection.send(f"{type(error).__name__}: {error}{location(error)}")
