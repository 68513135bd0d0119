"""Cases over processes: what dies, hangs or cannot begin costs its own case and nothing else."""

import multiprocessing
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from harness import pool
from harness.backend import BackendError, load_backend
from harness.pool import Settings, Task, run_cases, run_tasks
from harness.runner import new_record, run_case
from tests.harness.backends import QUANTIZE

# One module for every process of this file: what it does depends on the rows of the matrix.
KERNELS = """
import ctypes, os, signal, time
from reference import ops

SEGFAULT, HANG, EXIT, RAISE = 17, 18, 19, 20

class Backend:
    def quantize(self, x, recipe):
        if x.shape[0] == SEGFAULT:
            ctypes.string_at(0)
        if x.shape[0] == HANG:
            time.sleep(600)
        if x.shape[0] == EXIT:
            os._exit(3)
        if x.shape[0] == RAISE:
            raise ValueError("not today")
        return ops.quantize(x, recipe)

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


def test_a_crash_a_hang_and_an_exception_cost_their_own_cases(kernels):
    cases = [case_of(rows) for rows in (16, 17, 18, 19, 20, 21)]
    seen = []
    settings = Settings("pool_kernels:Backend", seed=7, workers=2, timeout=12.0)
    records = run_cases(cases, settings, seen.append)
    assert seen == records
    assert sorted(r["case"] for r in records) == sorted(case.id for case in cases)
    said = {int(r["shape"].split("x")[0]): (r["verdict"], r["message"]) for r in records}
    assert said[16] == said[21] == ("pass", "")
    assert said[17] == ("crash", "the process died (signal SIGSEGV)")
    assert said[18] == ("timeout", "no result after 12 s")
    assert said[19] == ("crash", "the process died (exit status 3)")
    assert said[20][0] == "error"
    assert said[20][1].startswith("quantize raised ValueError: not today (at pool_kernels.py:")
    for record in records:
        assert (record["backend"], record["device"], record["seed"]) == ("pool_kernels:Backend", "cpu", 7)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Broken", r"backend pool_kernels:Broken: Broken\(\) raised OSError: libkernels.so is missing"),
        ("Dying", r"a worker process died at its start \(signal SIGKILL\)"),
    ],
)
def test_a_backend_that_cannot_begin_ends_the_run(kernels, name, message):
    records = []
    with pytest.raises(BackendError) as raised:
        run_cases([case_of(16)] * 3, Settings(f"pool_kernels:{name}"), records.append)
    assert re.fullmatch(message, str(raised.value))
    assert records == []
    assert not multiprocessing.active_children()


def test_no_cases_need_no_process(monkeypatch):
    monkeypatch.setattr(pool, "_Worker", None)
    assert run_cases([], Settings(workers=4), print) == []


# The protocol, without processes: workers that follow a script, which says for each case whether a record comes and
# whether its worker dies, or that the person interrupts.


class Scripted(pool._Worker):
    script: list[str]
    made: list[pool._Worker]

    def __init__(self, settings):
        self.connection, self.theirs = multiprocessing.Pipe()
        self.killed = False
        self.joined = []
        self.process = SimpleNamespace(kill=self._kill, join=self._join, exitcode=-9)
        self.task, self.ready, self.since, self.settings = None, False, 0.0, settings
        self.made.append(self)
        self.theirs.send("")

    def _kill(self):
        self.killed = True

    def _join(self, timeout=None):
        self.joined.append(timeout)

    def give(self, task):
        super().give(task)
        assert self.theirs.recv() == task
        word = self.script.pop(0)
        if word == "interrupt":
            raise KeyboardInterrupt
        record = new_record(task.case, backend="b", device="cpu", seed=task.seed).to_dict()
        if word.startswith("so far"):
            self.theirs.send((pool.SO_FAR, record | {"verdict": "fail"}))
        elif word != "die":
            self.theirs.send(record)
        if "die" in word:
            self.theirs.close()


@pytest.fixture
def scripted(monkeypatch):
    def run(script, count, workers=1):
        monkeypatch.setattr(pool, "_Worker", Scripted)
        monkeypatch.setattr(Scripted, "script", [*script], raising=False)
        monkeypatch.setattr(Scripted, "made", [], raising=False)
        cases = [case_of(rows) for rows in range(1, count + 1)]
        return run_cases(cases, Settings(workers=workers, failures="failures"), lambda record: None)

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
    assert records[0]["message"] == "the process died (signal SIGKILL)"
    assert len(Scripted.made) == 2  # none for no case


def test_a_worker_that_dies_while_it_shrinks_a_failure_leaves_the_failure(scripted):
    """And the next one does not try: each would die of it."""
    records = scripted(["record", "so far, then die", "die"], 3)
    assert verdicts(records) == [("1x32", "pass"), ("2x32", "fail"), ("3x32", "crash")]
    note = "not shrunk: at another shape, crash: the process died (signal SIGKILL)"
    assert [record["save_note"] for record in records] == ["", note, ""]
    assert [worker.settings.failures for worker in Scripted.made] == ["failures", ""]


def test_no_more_workers_than_cases(scripted):
    assert len(scripted(["record", "record"], 2, workers=8)) == 2
    assert len(Scripted.made) == 2


def test_workers_end_by_themselves_or_are_ended(scripted):
    scripted(["record"], 1)
    (worker,) = Scripted.made
    assert worker.joined == [pool.GRACE, None]
    assert worker.killed
    assert worker.connection.closed


def test_an_interrupt_keeps_what_was_measured(scripted):
    records = scripted(["record", "interrupt"], 4)
    assert verdicts(records) == [("1x32", "pass")]
    (worker,) = Scripted.made
    assert worker.joined == [None]  # at once
    assert worker.killed


def test_what_was_measured_stays_where_the_backend_can_no_longer_be_loaded(kernels):
    cases = [case_of(rows) for rows in (16, 17, 18, 19)]
    records = run_cases(cases, Settings("pool_kernels:OnceOnly", workers=1), lambda record: None)
    said = [(r["shape"], r["verdict"], r["message"]) for r in records]
    gone = "backend pool_kernels:OnceOnly: OnceOnly() raised OSError: libkernels.so is gone"
    assert said == [
        ("16x32", "pass", ""),
        ("17x32", "crash", "the process died (signal SIGKILL)"),
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


def test_a_worker_runs_a_task_on_the_inputs_of_its_seed(monkeypatch):
    monkeypatch.setattr(pool, "signal", SimpleNamespace(signal=lambda *_: None, SIGINT=2, SIG_IGN=1))
    monkeypatch.setattr(pool, "prepare_process", lambda _: None)  # this process stays as it is
    ours, theirs = multiprocessing.Pipe()
    for seed in (3, 8):
        ours.send(Task(QUANTIZE, seed))
    ours.send(None)
    pool._serve(theirs, Settings("reference", seed=5))
    assert ours.recv() == ""
    records = [ours.recv() for _ in range(2)]
    assert [record["seed"] for record in records] == [3, 8]
    right = [run_case(QUANTIZE, load_backend("reference"), seed=seed).input_digest for seed in (3, 8)]
    assert [record["input_digest"] for record in records] == right
    assert len(set(right)) == 2
