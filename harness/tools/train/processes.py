"""Concurrent trainings. A training has a judge process, which runs the backend's layers in a kernel host. The end of a
host costs only the remaining steps of its training."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.backends.backend import BackendError
from narrowgauge.harness.backends.backend import error_location as location
from narrowgauge.harness.hosts.frames import Connection, FrameError
from narrowgauge.harness.hosts.starter import Channel
from narrowgauge.harness.machine.process import ending, prepare_process
from narrowgauge.harness.machine.processors import worker_gpu
from narrowgauge.harness.running.supervisor import Died, Fork, late_or_readable
from narrowgauge.harness.running.worker import JUDGING, LOAD
from narrowgauge.harness.tools.train.training import Training

if TYPE_CHECKING:
    from rich.console import Console

    from narrowgauge.harness.tools.train.train import TrainingTask

RECIPES = (
    "NVFP4BlockScaling", "NVFP4BlockScaling-norht", "NVFP4BlockScaling-nosr", "NVFP4BlockScaling-no2d",
    "NVFP4BlockScaling-norht-nosr-no2d", "MXFP8BlockScaling", "Float8BlockScaling", "Float8CurrentScaling",
    "DelayedScaling",
)  # fmt: skip
"""Default recipes: every recipe, and NVFP4 with each switch turned off."""
NOT_BEGUN = "not begun"
"""Error of a training that did not start."""


def tasks(recipes: Sequence[str], backend: str, device: str, *, seed: int, steps: int) -> list[TrainingTask]:
    """Tasks for each recipe and for high precision: the layers of the backend, judged, and the layers of the reference.

    Raises ValueError for an unknown training recipe.
    """
    from narrowgauge.harness.tools.train.model import LAYERS
    from narrowgauge.harness.tools.train.train import TrainingTask
    from narrowgauge.spec.modules.training import training_recipe

    names = dict.fromkeys(str(training_recipe(recipe)) for recipe in recipes)
    sharing = len(names) * steps * LAYERS
    return [
        TrainingTask(recipe, layers, device, seed, steps, judged=layers == backend, sharing=sharing)
        for recipe in [*names, None]
        for layers in dict.fromkeys((backend, "reference"))
    ]


class _Process(Fork):
    """The judge of a training in its process, as seen by the session."""

    def __init__(self, task: TrainingTask, workers: int, number: int) -> None:
        self.number, self.training, self._started = number, Training(task), time.monotonic()
        seconds = task.timeout + JUDGING + max(LOAD, task.timeout)
        super().__init__(
            f"{__name__}:main", [asdict(task), workers], channels=1, gpu=worker_gpu(number, task.device),
            seconds=seconds,
        )  # fmt: skip

    def step(self) -> bool:
        """Receive a step, or the end of the training. Returns whether more may follow."""
        from narrowgauge.harness.tools.train.train import TrainingStep

        try:
            message = self.receive()
        except TimeoutError:
            message = {"end": f"its process sent no step for {self.seconds:g} s"}
        except Died as died:
            message = {"end": f"its process died ({ending(died.status)})"}
        self.training.seconds = time.monotonic() - self._started
        if "end" in message:
            self.training.error = message["end"]
            return False
        self.training.steps.append(TrainingStep(**message["step"]))
        self.expect(self.training.task.timeout + JUDGING)
        return True


def run_tasks(
    tasks: Sequence[TrainingTask],
    workers: int,
    on_step: Callable[[Training], None],
    on_end: Callable[[Training, list[Training]], None] = lambda training, trainings: None,
) -> list[Training]:
    """Train all tasks, `workers` at a time. Judged tasks start first, because they take longest. Returns the trainings
    in the order of the tasks.

    `on_step` is called after every step, and `on_end` after every training, with all trainings. An interrupt ends the
    running trainings, which keep their steps. Trainings that did not start have no steps.
    """
    waiting = sorted(enumerate(tasks), key=lambda item: (item[1].judged and item[1].recipe is not None, -item[0]))
    trainings = [Training(task, error=NOT_BEGUN) for task in tasks]
    running: dict[int, _Process] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                place, task = waiting.pop()
                number = next(number for number in range(workers) if number not in running)
                running[number] = _Process(task, workers, number)
                trainings[place] = running[number].training
            for process in late_or_readable(list(running.values())):
                if process.step():
                    on_step(process.training)
                else:
                    process.stop()
                    del running[process.number]
                    on_end(process.training, trainings)
    except KeyboardInterrupt:
        for process in running.values():
            process.training.error = "interrupted"
    finally:
        for process in running.values():
            process.stop()
    return trainings


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Treat the first SIGTERM within the context as an interrupt, so that a time limit or a scheduler loses no results.

    Further signals are ignored: `timeout` sends two, to the process and to its group.
    """

    def interrupt(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_session(
    tasks: Sequence[TrainingTask], directory: Path, *, workers: int, console: Console | None = None
) -> bool:
    """Train all tasks, print and write the report. Returns whether all passed. Raises OSError if the report cannot be
    written.

    The report is written after every training and marks unfinished trainings. A console that is no terminal gets a line
    per finished training.
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
                summary = f"{report.name(training)}: step {len(training.steps)}, loss {step.loss:.3f}"
                progress.update(bar, advance=1, description=summary)

            def on_end(training: Training, trainings: list[Training]) -> None:
                if not console.is_terminal:
                    console.print(report.line(training), markup=False, highlight=False, soft_wrap=True)
                report.write(trainings, environment, entropy, directory)

            trainings = run_tasks(tasks, workers, on_step, on_end)
        report.print_result(trainings, entropy, console)
        page = report.write(trainings, environment, entropy, directory)
        passed = all(training.passed(entropy) for training in trainings)
        summary = f"{report.sentence(trainings, entropy)}; {time.monotonic() - started:.1f} s; report: {page}"
        console.print(summary, markup=False, highlight=False, soft_wrap=True, style="" if passed else "bold red")
    return passed


def main(connection: Connection, hosts: Channel, settings: dict[str, Any], workers: int) -> None:
    """Train in a process of its own, and send the steps. `settings`: fields of the task."""
    prepare_process(workers)
    from narrowgauge.harness.tools.train.model import Size
    from narrowgauge.harness.tools.train.train import TrainingTask, train

    task = TrainingTask(**settings | {"size": Size(**settings["size"])})
    try:
        for step in train(task, hosts, workers):
            connection.send({"step": asdict(step)})
        end = ""
    except FrameError:  # the session ended
        return
    except BackendError as error:
        end = str(error)
    except Exception as error:  # an unreadable result ends only its own training
        end = f"{type(error).__name__}: {error}{location(error)}"
    with suppress(FrameError):
        connection.send({"end": end})
