"""A worker: a judge process with its kernel host. The judge makes inputs, compares results and diagnoses failures; the
host runs the backend. The end of a host costs one case."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.contracts.traces import VARIABLE
from narrowgauge.harness.cases.operations import outside_paths
from narrowgauge.harness.hosts.frames import Connection, FrameError
from narrowgauge.harness.hosts.starter import Channel, starter, state_of
from narrowgauge.harness.machine.gpu_lock import without_gpu_lock
from narrowgauge.harness.machine.process import ending, prepare_process
from narrowgauge.harness.records.record import new_record
from narrowgauge.harness.running.supervisor import Died, Fork
from narrowgauge.spec.program import measured_functions
from narrowgauge.spec.recipes import rule_files

if TYPE_CHECKING:
    from narrowgauge.harness.backends.backend import Backend
    from narrowgauge.harness.hosts.remote_host import RemoteHost

OnRecord = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Settings:
    """Settings that all cases of a run share."""

    backend: str = "native"
    device: str = "cpu"
    seed: int = 0
    """Seed of the inputs of tasks without their own."""
    workers: int = 1
    timeout: float = 300.0
    """Seconds that a case may take."""
    input_path: str = ""
    """File of captured tensors, for cases made from a file."""
    failures: str = ""
    """Folder for shrunk failures. Empty: failures are not saved."""
    schedules: int = 0
    """Number of seeded thread shuffles of each case. 0: the backend's default."""
    sanitize: bool = False
    """Whether kernel hosts have the sanitizers, and build native kernels with them."""
    sharing: int = 0
    """Number of cases that share the run's false alarms. 0: `run_tasks` counts its tasks."""
    untrusted: bool = False
    """Whether kernel hosts are separated from the reference and from the files of the run."""
    fresh_host: bool = False
    """Whether each case has a kernel host of its own."""
    change: tuple[str, str, str] | None = None
    """A changed source file in the kernel hosts, as in `HostSettings`."""

    @property
    def options(self) -> str:
        """The options of `narrowgauge show` with these settings of kernel hosts, beside backend and device."""
        schedules = f"--schedules {self.schedules}" if self.schedules else ""
        chosen = ("--sanitize" if self.sanitize else "", "--untrusted" if self.untrusted else "")
        files = [("--operations", path) for path in outside_paths()] + [("--rules", path) for path in rule_files()]
        files += [("--functions", measured.path)] if (measured := measured_functions()) else []
        own = [f"{option} {shlex.quote(os.path.relpath(path))}" for option, path in files]
        return " ".join(filter(None, (schedules, *chosen, *own)))


@dataclass(frozen=True)
class Task:
    """A case on the inputs of a seed."""

    case: Case
    seed: int
    first: bool = False
    """Whether the task runs before others of its kind to compile kernels on a GPU. It waits for no lock."""


GRACE = 5.0
"""Seconds that a worker without work has to end by itself."""
LOAD = 300.0
"""Largest number of seconds for loading a backend; a longer timeout of a case counts instead."""
STOPPED = 5.0
"""Seconds beyond the timeout of a case, before a judge stopped or traced by a kernel is given up."""
JUDGING = 120.0
"""Seconds of a judge beyond the timeout of a case, which limits the calls of the backend."""


class Lost(Exception):
    """A worker that is of no more use: how its case ended, and why."""

    def __init__(self, verdict: str, message: str, *, loaded: bool) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.loaded = loaded
        """Whether the worker had loaded the backend. If not, a new worker would not load the backend either."""


class Worker(Fork):
    """A worker, as seen by the run."""

    room: int | None = None
    """Bytes of memory that were free when the worker was ready."""
    judges_on_gpu = False
    """Whether the worker had a task that is judged on a GPU."""
    last = False
    """Whether the worker ends after its last record: it can start no kernel host."""
    ready = False
    """Whether the worker has loaded the backend."""
    pid = 0
    """Process id of the judge, when it is ready."""
    task: Task | None = None

    def __init__(self, settings: Settings, gpu: str = "", on_loaded: OnRecord = lambda news: None) -> None:
        """Start the judge, on the GPU of that name. Its first message says whether the backend is loaded.

        `on_loaded`: called with the sources loaded by the backend (`harness.records.loaded_sources`), before the record
        of the loading case.
        """
        self.settings, self.gpu, self._on_loaded = settings, gpu, on_loaded
        super().__init__(
            f"{__name__}:main", [asdict(settings)], channels=2, gpu=gpu, seconds=max(LOAD, settings.timeout) + JUDGING
        )

    def give(self, task: Task, timeout: float = 0.0, sharing: int = 0) -> None:
        """Give the worker a task with `timeout` seconds, or those of the settings. `sharing`: as in `Settings`.

        Raises Died if the judge has died.
        """
        seconds = min(timeout or self.settings.timeout, 1e9)
        self.task = task
        self.expect(seconds + JUDGING)
        case = json.loads(json.dumps(task.case.labels()))
        sharing = max(1, sharing or self.settings.sharing)
        message = {"case": case, "seed": task.seed, "first": task.first, "timeout": seconds, "sharing": sharing}
        self.send(message)

    @property
    def stopped(self) -> bool:
        """Whether the time of the task is over, and another process has stopped the judge: it will give no record."""
        late = self.task is not None and time.monotonic() > self.deadline - JUDGING + STOPPED
        return late and state_of(self.pid) in ("T", "t")

    def record(self) -> dict[str, Any] | None:
        """The record of the task, or None when the worker is ready. Raises Lost without a message."""
        try:
            answer = self.receive()
        except TimeoutError:
            seconds = f"{self.seconds:g} s"
            if self.ready:
                raise Lost("timeout", f"the judge gave no record after {seconds}", loaded=True) from None
            words = f"backend {self.settings.backend} did not load within {seconds}"
            raise Lost("timeout", words, loaded=False) from None
        except Died as died:
            subject = "the judge" if self.ready else "a judge"
            message = f"{subject} of the case died ({ending(died.status)}): {died}"
            raise Lost("crash", message, loaded=self.ready) from None
        if "failed" in answer:
            raise Lost("error", answer["failed"], loaded=False)
        for news in answer["loaded"]:
            self._on_loaded(news)
        if "room" in answer:
            self.ready, self.room, self.pid = True, answer["room"], answer["pid"]
            return None
        record: dict[str, Any] = answer["record"]
        self.last = answer["last"]
        if self.task is None or (record["case"], record["seed"]) != (self.task.case.id, self.task.seed):
            expected = self.task.case.id if self.task else "no case"
            raise Lost("error", f"the judge sent a record of {record['case']}, not of {expected}", loaded=self.ready)
        return record

    def finish(self) -> None:
        """End the judge and its host after its task."""
        with suppress(Died):
            self.send({"end": True})
        self.stop(GRACE)


def without_result(task: Task, settings: Settings, verdict: str, message: str) -> dict[str, Any]:
    """The record of a task without a record of its own."""
    record = new_record(
        task.case, backend=settings.backend, device=settings.device, seed=task.seed, options=settings.options
    )
    record.verdict, record.message = verdict, message
    return record.to_dict()


def main(connection: Connection, hosts: Channel, other_hosts: Channel, settings: dict[str, Any]) -> None:
    """Be the judge of a worker, with the fields of the settings."""
    change = settings.pop("change")
    given = Settings(**settings, change=change and tuple(change))
    prepare_process(given.workers, given.device)
    with suppress(FrameError):  # the run is gone
        serve(connection, hosts, other_hosts, given)


def serve(connection: Connection, hosts: Channel, other_hosts: Channel, settings: Settings) -> None:
    """Judge tasks, and send their records, until the message `end`.

    A channel has one host at a time: `hosts` starts the host of the run, `other_hosts` the hosts for a second run of a
    failing case.
    """
    from narrowgauge.harness.backends.backend import Backend
    from narrowgauge.harness.backends.loading import extra_folder
    from narrowgauge.harness.cases.operations import case_from_labels
    from narrowgauge.harness.inputs.capture import Captured
    from narrowgauge.harness.running.earlier_cases import EarlierCases
    from narrowgauge.harness.running.runner import run_case
    from narrowgauge.harness.running.save_failures import Keeper

    try:
        host = kernel_host(settings, hosts)
        backend = Backend(host)
        captures = Captured.load(settings.input_path) if settings.input_path else None
    except Exception as error:
        connection.send({"failed": str(error)})
        return
    keeper = Keeper(Path(settings.failures)) if settings.failures else None

    def loaded() -> list[dict[str, Any]]:
        """What the backend has loaded since the last call, with its declarations about sources."""
        news, host.loaded = host.loaded, []
        return [entry | {"declared": backend.named} for entry in news]

    connection.send({"room": host.room(), "loaded": loaded(), "pid": os.getpid()})

    @contextmanager
    def other_host() -> Iterator[Backend]:
        with closing(kernel_host(settings, other_hosts)) as other:
            yield Backend(other)

    earlier = EarlierCases(other_host, captures, settings.untrusted, host.loading)
    folder = extra_folder(settings.backend)
    options = shlex.join(["--path", folder, *shlex.split(settings.options)]) if folder else settings.options
    while "end" not in (message := connection.receive()[0]):
        labels = message["case"] | {"shape": tuple(message["case"]["shape"])}
        case = case_from_labels(**labels)
        if host.process is None:
            earlier.ran.clear()
        with without_gpu_lock() if message["first"] else nullcontext():
            record = run_case(
                case, backend, device=settings.device, seed=message["seed"], captures=captures, keeper=keeper,
                earlier=None if settings.change else earlier, sharing=message["sharing"], timeout=message["timeout"],
                untrusted=settings.untrusted, options=options,
            )  # fmt: skip
        if record.verdict == "timeout":
            record.options = f"{record.options} --timeout {message['timeout']:g}".lstrip()
        earlier.ran.append((case, record.seconds_total or 0.0))
        if settings.fresh_host:
            host.close()
        connection.send({"record": record.to_dict(), "last": host.orphaned, "loaded": loaded()})
        if host.orphaned:
            return
    host.close()


@contextmanager
def backend_in_host(settings: Settings) -> Iterator[Backend]:
    """The backend of the settings in a kernel host, for a command that judges in its own process. Raises BackendError
    as `kernel_host` does."""
    from narrowgauge.harness.backends.backend import Backend

    with closing(Channel(starter().connect())) as channel, closing(kernel_host(settings, channel)) as host:
        yield Backend(host)


def kernel_host(settings: Settings, hosts: Channel) -> RemoteHost:
    """A kernel host with the backend of the settings. Raises BackendError if the backend cannot be loaded."""
    from narrowgauge.harness.hosts.remote_host import HostSettings, RemoteHost

    given = HostSettings(
        settings.backend, settings.device, settings.schedules, settings.workers, settings.untrusted, settings.sanitize,
        settings.change, _own_folders(settings) if settings.untrusted else (),
    )  # fmt: skip
    interpreter = None
    if settings.sanitize:
        from narrowgauge.harness.running.sanitizer import Sanitizer

        interpreter = Sanitizer()
    return RemoteHost(given, hosts, interpreter=interpreter, load=max(LOAD, settings.timeout))


def _own_folders(settings: Settings) -> tuple[str, ...]:
    """Folders to which only the processes of the run write: the report, and the steps of contracts."""
    report = os.path.dirname(os.path.abspath(settings.failures)) if settings.failures else ""
    return tuple(filter(None, (report, os.environ.get(VARIABLE))))
