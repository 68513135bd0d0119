"""Cases over processes: what dies, hangs or cannot begin costs its own case and nothing else."""

import multiprocessing
import platform
import re
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.harness.backends.backend import BackendError, load_backend
from narrowgauge.harness.machine.processors import VISIBLE_DEVICES
from narrowgauge.harness.records.record import new_record
from narrowgauge.harness.running import pool, worker
from narrowgauge.harness.running.pool import Settings, Task, run_cases, run_tasks
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.running.worker import GRACE, KILLED, Worker, serve
from tests.harness.sample_backends import QUANTIZE

SIGKILL = "signal SIGKILL, as where memory runs out"
# One module for every process of this file: what it does depends on the rows of the matrix.
KERNELS = """
import os, signal
from narrowgauge.reference import ops

class Broken:
    def __init__(self):
        raise OSError("libkernels.so is missing")

class OnceOnly:
    # Loads the first time, dies at 17 rows, and then its library is gone.
    def __init__(self):
        if os.path.exists("loaded"):
            raise OSError("libkernels.so is gone")
        open("loaded", "w").close()

    def quantize(self, x, recipe, *, amax=None, random=None):
        if x.shape[0] == 17:
            os.kill(os.getpid(), signal.SIGKILL)
        return ops.quantize(x, recipe)

class Dying:
    def __init__(self):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    (tmp_path / "pool_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)


def case_of(rows):
    return replace(QUANTIZE, shape=(rows, 32))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Broken", r"backend pool_kernels:Broken: Broken\(\) raised OSError: libkernels.so is missing"),
        ("Dying", rf"a worker process died at its start \({SIGKILL}\)"),
    ],
)
def test_a_backend_that_cannot_begin_ends_the_run(kernels, name, message):
    records = []
    with pytest.raises(BackendError) as raised:
        run_cases([case_of(16)] * 3, Settings(f"pool_kernels:{name}"), records.append)
    assert re.fullmatch(message, str(raised.value))
    assert records == []
    assert not multiprocessing.active_children()


def test_a_backend_whose_import_never_returns_ends_the_run(kernels, tmp_path, monkeypatch):
    """Its process is killed, though it has not come to ask for a task."""
    (tmp_path / "hanging_kernels.py").write_text("import time\n\ntime.sleep(1000)\n")
    monkeypatch.setattr(worker, "LOAD", 0.0)
    records = []
    with pytest.raises(BackendError, match=r"backend hanging_kernels:B did not load within 1 s; a longer --timeout"):
        run_cases([case_of(16)] * 3, Settings("hanging_kernels:B", timeout=1.0), records.append)
    assert records == []
    assert not multiprocessing.active_children()


def test_no_cases_need_no_process(monkeypatch):
    monkeypatch.setattr(pool, "Worker", None)
    assert run_cases([], Settings(workers=4), print) == []


# The protocol, without processes: workers that follow a script, which says for each case whether a record comes and
# whether its worker dies, or that the person interrupts.


class Scripted(Worker):
    script: list[str]
    made: list[Worker]

    def __init__(self, settings, gpu=""):
        self.connection, self.theirs = multiprocessing.Pipe()
        self.killed = False
        self.joined = []
        self.process = SimpleNamespace(kill=self._kill, join=self._join, exitcode=-9, pid=None)
        self.task, self.ready, self.last, self.settings, self.gpu = None, False, False, settings, gpu
        self.since, self.limit = time.monotonic(), max(worker.LOAD, settings.timeout)
        self._sanitizer = None
        self.made.append(self)
        if "never loads" not in self.script:
            self.theirs.send(1 << 40)  # bytes of memory

    def _kill(self):
        self.killed = True

    def _join(self, timeout=None):
        self.joined.append(timeout)

    def give(self, task, timeout=0.0):
        super().give(task, timeout)
        assert self.theirs.recv() == task
        word = self.script.pop(0)
        if word == "interrupt":
            raise KeyboardInterrupt
        record = new_record(task.case, backend="b", device="cpu", seed=task.seed).to_dict()
        if word.startswith("so far"):
            self.theirs.send((worker.SO_FAR, record | {"verdict": "fail"}))
        elif word == "last":
            self.theirs.send((worker.LAST, record | {"verdict": "crash"}))
        elif word != "die":
            self.theirs.send(record)
        if "die" in word:
            self.theirs.close()


@pytest.fixture
def scripted(monkeypatch):
    def run(script, count, workers=1, **settings):
        monkeypatch.setattr(pool, "Worker", Scripted)
        monkeypatch.setattr(Scripted, "script", [*script], raising=False)
        monkeypatch.setattr(Scripted, "made", [], raising=False)
        cases = [case_of(rows) for rows in range(1, count + 1)]
        return run_cases(cases, Settings(workers=workers, failures="failures", **settings), lambda record: None)

    return run


def verdicts(records):
    return [(record["shape"], record["verdict"]) for record in records]


def test_a_worker_that_dies_between_two_cases_costs_none(scripted):
    records = scripted(["record, then die", "record", "record"], 3)
    assert verdicts(records) == [("1x32", "pass"), ("2x32", "pass"), ("3x32", "pass")]
    assert len(Scripted.made) == 2


def test_a_worker_that_dies_after_the_last_case_costs_none(scripted):
    assert verdicts(scripted(["record", "record, then die"], 2)) == [("1x32", "pass"), ("2x32", "pass")]


def test_every_worker_that_dies_is_replaced(scripted):
    records = scripted(["die", "record", "die"], 3)
    assert verdicts(records) == [("1x32", "crash"), ("2x32", "pass"), ("3x32", "crash")]
    assert records[0]["message"] == f"the process died ({SIGKILL})"
    assert len(Scripted.made) == 2  # none for no case


def test_a_worker_that_dies_while_it_shrinks_a_failure_leaves_the_failure(scripted):
    """And the next one does not try: each would die of it."""
    records = scripted(["record", "so far, then die", "die"], 3)
    assert verdicts(records) == [("1x32", "pass"), ("2x32", "fail"), ("3x32", "crash")]
    note = f"not shrunk: at another shape, crash: the process died ({SIGKILL})"
    assert [record["save_note"] for record in records] == ["", note, ""]
    assert [worker.settings.failures for worker in Scripted.made] == ["failures", ""]


def test_a_worker_whose_gpu_answers_no_more_is_replaced(scripted):
    """It says so with its record, and is given nothing more."""
    records = scripted(["record", "last", "record"], 3)
    assert verdicts(records) == [("1x32", "pass"), ("2x32", "crash"), ("3x32", "pass")]
    first, second = Scripted.made
    assert (first.killed, first.joined) == (True, [KILLED])
    assert second.ready


def test_a_backend_that_does_not_load_in_time_ends_the_run(scripted, monkeypatch):
    monkeypatch.setattr(worker, "LOAD", 0.0)
    message = r"backend native did not load within 0\.1 s; a longer --timeout gives it more"
    with pytest.raises(BackendError, match=message):
        scripted(["never loads"], 3, workers=2, timeout=0.1)
    assert all(made.killed for made in Scripted.made)


@pytest.mark.parametrize("named", ["2,5", None])
def test_workers_take_the_gpus_in_turn_and_a_new_one_takes_that_of_the_dead(scripted, monkeypatch, named):
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    if named is not None:
        monkeypatch.setenv(VISIBLE_DEVICES, named)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = ["2", "5"] if named else ["0", "1"]
    scripted(["record"] * 3, 3, workers=3, device="cuda")
    assert [made.gpu for made in Scripted.made] == [*names, names[0]]
    scripted(["die", "die", "record", "record"], 4, workers=2, device="cuda")
    gpus = [made.gpu for made in Scripted.made]
    assert (gpus[:2], sorted(gpus[2:])) == (names, names)
    scripted(["record"], 1)
    assert [made.gpu for made in Scripted.made] == [""]


def test_no_more_workers_than_cases(scripted):
    assert len(scripted(["record", "record"], 2, workers=8)) == 2
    assert len(Scripted.made) == 2


def test_workers_end_by_themselves_or_are_ended(scripted):
    scripted(["record"], 1)
    (worker,) = Scripted.made
    assert worker.joined == [GRACE, KILLED]
    assert worker.killed
    assert worker.connection.closed


def test_an_interrupt_keeps_what_was_measured(scripted):
    records = scripted(["record", "interrupt"], 4)
    assert verdicts(records) == [("1x32", "pass")]
    (worker,) = Scripted.made
    assert worker.joined == [KILLED]  # at once
    assert worker.killed


def test_what_was_measured_stays_where_the_backend_can_no_longer_be_loaded(kernels):
    cases = [case_of(rows) for rows in (16, 17, 18, 19)]
    records = run_cases(cases, Settings("pool_kernels:OnceOnly", workers=1), lambda record: None)
    said = [(r["shape"], r["verdict"], r["message"]) for r in records]
    gone = "backend pool_kernels:OnceOnly: OnceOnly() raised OSError: libkernels.so is gone"
    assert said == [
        ("16x32", "pass", ""),
        ("17x32", "crash", f"the process died ({SIGKILL})"),
        ("18x32", "error", gone),
        ("19x32", "error", gone),
    ]


def test_one_pool_serves_cases_of_several_seeds(scripted, monkeypatch):
    scripted([], 0)  # the scripted workers in place of processes
    monkeypatch.setattr(Scripted, "script", ["record", "die", "record", "record"])
    tasks = [Task(case_of(rows), seed) for seed in (3, 8) for rows in (1, 2)]
    records = []
    run_tasks(iter(tasks), Settings(seed=5), records.append)
    said = [(record["shape"], record["seed"], record["verdict"]) for record in records]
    assert said == [("1x32", 3, "pass"), ("2x32", 3, "crash"), ("1x32", 8, "pass"), ("2x32", 8, "pass")]
    assert len(Scripted.made) == 2


def test_a_worker_runs_a_task_on_the_inputs_of_its_seed():
    ours, theirs = multiprocessing.Pipe()
    for seed in (3, 8):
        ours.send(Task(QUANTIZE, seed))
    ours.send(None)
    serve(theirs, Settings("reference", seed=5))
    assert ours.recv() > 0  # bytes of memory that it could take
    records = [ours.recv() for _ in range(2)]
    assert [record["seed"] for record in records] == [3, 8]
    right = [run_case(QUANTIZE, load_backend("reference"), seed=seed).input_digest for seed in (3, 8)]
    assert [record["input_digest"] for record in records] == right
    assert len(set(right)) == 2


FREED = """
import ctypes, resource
from narrowgauge.harness.running.worker import _keep_memory

def faults(libc):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (1 << 24, 1 << 26):
        block = libc.malloc(size)
        ctypes.memset(block, 1, size)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
before = [faults(libc) for _ in range(3)][-1]
_keep_memory()
after = [faults(libc) for _ in range(3)][-1]
print(before, after)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_a_worker_does_not_ask_for_the_same_memory_again_and_again() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after < 10 < before
