"""Cases over workers: a judge or a kernel host that dies, hangs or cannot begin costs its own case alone."""

import json
import os
import re
import time
from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.backends.backend import BackendError, load_backend
from narrowgauge.harness.hosts.frames import Connection, pair
from narrowgauge.harness.hosts.remote_host import HostSettings, RemoteHost
from narrowgauge.harness.hosts.starter import Channel, children, starter
from narrowgauge.harness.machine.processors import VISIBLE_DEVICES
from narrowgauge.harness.records.record import new_record
from narrowgauge.harness.records.saved_failure import load
from narrowgauge.harness.running import pool, worker
from narrowgauge.harness.running.pool import Settings, Task, run_cases, run_tasks
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.running.worker import GRACE, Worker
from tests.harness.sample_backends import QUANTIZE

SIGKILL = "signal SIGKILL, as where memory runs out"
KERNELS = """
import ctypes, os, signal, socket, sys, time
from narrowgauge.reference import ops

class Broken:
    def __init__(self):
        raise OSError("libkernels.so is missing")

class Dying:
    def __init__(self):
        os.kill(os.getpid(), signal.SIGKILL)

class Stopping:
    # Stops the process at the other end of the connection at 16 rows.
    def quantize(self, x, recipe):
        if x.shape[0] == 16:
            for number in map(int, os.listdir("/proc/self/fd")):
                try:
                    end = socket.socket(fileno=os.dup(number))
                    judge = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                except OSError:
                    continue
                self.stop(int.from_bytes(judge[:4], sys.byteorder))
                time.sleep(600)
        return ops.quantize(x, recipe)

    def stop(self, judge):
        os.kill(judge, signal.SIGSTOP)

class Tracing(Stopping):
    def stop(self, judge):
        for request in (0x4206, 0x4207):  # PTRACE_SEIZE and PTRACE_INTERRUPT of linux/ptrace.h
            ctypes.CDLL(None).ptrace(request, judge, None, None)

class Talking:
    # Many long notes.
    def quantize(self, x, recipe):
        from narrowgauge.harness.hosts import serve
        serve.changes = lambda before, after: [{"cause": "c", "sentence": "s" * 5000}] * 1000
        return ops.quantize(x, recipe)

class Fragile:
    # Wrong at 32 rows, and dies at fewer.
    def quantize(self, x, recipe, *, amax=None, random=None):
        if x.shape[0] < 32:
            os._exit(6)
        q = ops.quantize(x, recipe)
        q.codes[-1, -1] ^= 1
        return q
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    (tmp_path / "pool_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)


def running_judges(seconds=20.0):
    """Judges and hosts of this process that do not end: grandchildren of the starter."""
    until = time.monotonic() + seconds
    while True:
        servers = [server for starter_ in children(os.getpid()) for server in children(starter_)]
        found = [pid for server in servers for pid in children(server)]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.02)


def case_of(rows):
    return replace(QUANTIZE, shape=(rows, 32))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Broken", r"backend pool_kernels:Broken: Broken\(\) raised OSError: libkernels.so is missing"),
        ("Dying", rf"backend pool_kernels:Dying: the process died \({SIGKILL}\)"),
    ],
)
def test_a_backend_that_cannot_begin_ends_the_run(kernels, name, message):
    records = []
    with pytest.raises(BackendError) as raised:
        run_cases([case_of(16)] * 3, Settings(f"pool_kernels:{name}"), records.append)
    assert re.fullmatch(message, str(raised.value))
    assert records == []
    assert not running_judges()


@pytest.mark.long
def test_a_backend_whose_import_never_returns_ends_the_run(kernels, tmp_path, monkeypatch):
    """The judge ends the host, or the run ends a judge without an answer."""
    (tmp_path / "hanging_kernels.py").write_text("import time\n\ntime.sleep(1000)\n")
    channel = Channel(starter().connect())
    with pytest.raises(
        BackendError,
        match=r"backend hanging_kernels:B did not load within 1 s at hanging_kernels\.py:3 in <module>; a longer ",
    ):
        RemoteHost(HostSettings("hanging_kernels:B"), channel, load=1.0)
    channel.close()
    monkeypatch.setattr(worker, "LOAD", 0.0)
    monkeypatch.setattr(worker, "JUDGING", 0.0)
    records = []
    with pytest.raises(BackendError, match=r"backend hanging_kernels:B did not load within 1 s"):
        run_cases([case_of(16)] * 3, Settings("hanging_kernels:B", timeout=1.0), records.append)
    assert records == []
    assert not running_judges()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["Stopping", "Tracing"])
def test_a_kernel_that_stops_its_judge_loses_little_time(name, kernels):
    records = []
    start = time.monotonic()
    run_cases([case_of(16), case_of(32)], Settings(f"pool_kernels:{name}", timeout=1.0), records.append)
    assert time.monotonic() - start < 60  # the limit of a judge that runs is 120 s longer
    assert {record["shape"]: record["verdict"] for record in records} == {"16x32": "timeout", "32x32": "pass"}
    (message,) = (record["message"] for record in records if record["verdict"] == "timeout")
    assert message == "the judge of the case was stopped by another process"
    assert not running_judges()


def test_notes_of_a_kernel_are_few_and_short(kernels):
    records = []
    run_cases([case_of(16)], Settings("pool_kernels:Talking"), records.append)
    (record,) = records
    assert record["verdict"] == "pass"
    assert len(record["notes"]) == 21
    assert record["notes"][-1]["sentence"] == "980 more notes of the case are left out"
    assert len(json.dumps(record)) < 1 << 16


# Scheduling, without processes. A scripted worker follows a word for each case.


class Scripted(Worker):
    script: list[str]
    made: list[Worker]

    def __init__(self, settings, gpu="", on_loaded=lambda news: None):
        self.connection, self.judge = map(Connection, pair())
        self.ended = []
        self.settings, self.gpu, self._on_loaded = settings, gpu, on_loaded
        self.expect(max(worker.LOAD, settings.timeout) + worker.JUDGING)
        self.made.append(self)
        if "never loads" not in self.script:
            self.judge.send({"room": 1 << 40, "loaded": [], "pid": os.getpid()})

    def end(self, wait=0.0):
        self.ended.append(wait)
        self.judge.close()
        return -9

    def give(self, task, timeout=0.0, sharing=0):
        super().give(task, timeout, sharing)
        message, _ = self.judge.receive()
        assert (message["case"]["shape"], message["seed"]) == (list(task.case.shape), task.seed)
        word = self.script.pop(0)
        if word == "interrupt":
            raise KeyboardInterrupt
        record = new_record(task.case, backend="b", device="cpu", seed=task.seed).to_dict()
        for _ in range(word.count("record")):
            self.judge.send({"record": record, "last": word == "last record", "loaded": []})
        if "die" in word:
            self.judge.close()


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(pool, "START", {"cpu": 1e-9, "cuda": 1e-9})  # any task is worth a worker

    def run(script, count, workers=1, **settings):
        monkeypatch.setattr(pool, "Worker", Scripted)
        monkeypatch.setattr(Scripted, "script", [*script], raising=False)
        monkeypatch.setattr(Scripted, "made", [], raising=False)
        cases = [case_of(rows) for rows in range(1, count + 1)]
        return run_cases(cases, Settings(workers=workers, failures="failures", **settings), lambda record: None)

    return run


def test_small_work_has_one_worker_and_more_start_with_time(scripted, monkeypatch):
    monkeypatch.setattr(pool, "START", {"cpu": 0.5})
    scripted(["record"] * 4, 4, workers=4)
    assert len(Scripted.made) == 1
    large = [Task(replace(case_of(16), shape=(1 << 10, 1 << 14)), 0)] * 8  # 3.5 s each
    assert [pool.worthwhile_workers(large, Settings(workers=n)) for n in (1, 4, 64)] == [1, 4, 8]
    assert pool.worthwhile_workers([], Settings(workers=4)) == 0
    Scripted.made.clear()
    clock = iter(range(1 << 20))
    monkeypatch.setattr(pool.time, "monotonic", lambda: next(clock))  # every look at the clock takes a second
    scripted(["record"] * 8, 8, workers=3)
    assert len(Scripted.made) == 3


def verdicts(records):
    return [(record["shape"], record["verdict"]) for record in records]


def test_a_worker_that_dies_between_two_cases_costs_none(scripted):
    records = scripted(["record, then die", "record", "record"], 3)
    assert verdicts(records) == [("1x32", "pass"), ("2x32", "pass"), ("3x32", "pass")]
    assert len(Scripted.made) == 2


def test_a_judge_without_a_record_is_ended_after_its_time(scripted, monkeypatch):
    monkeypatch.setattr(worker, "JUDGING", 0.0)
    records = scripted(["hang", "record"], 2, timeout=0.1)
    assert verdicts(records) == [("1x32", "timeout"), ("2x32", "pass")]
    assert records[0]["message"] == "the judge gave no record after 0.1 s"
    assert Scripted.made[0].ended == [0.0]


def test_a_second_record_of_a_case_is_an_error(scripted):
    """The next case of the worker has the error, and exactly one record."""
    records = scripted(["record, record", "wait", "record"], 3)
    assert verdicts(records) == [("1x32", "pass"), ("2x32", "error"), ("3x32", "pass")]
    assert records[1]["message"] == f"the judge sent a record of {case_of(1).id}, not of {case_of(2).id}"


@pytest.mark.parametrize("named", ["2,5", None])
def test_workers_take_the_gpus_in_turn(scripted, monkeypatch, named):
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


def test_workers_end_by_themselves_or_are_ended(scripted):
    scripted(["record"], 1)
    (worker,) = Scripted.made
    assert worker.ended == [GRACE]
    assert worker.connection.fileno() == -1


def test_an_interrupt_keeps_what_was_measured(scripted):
    records = scripted(["record", "interrupt"], 4)
    assert verdicts(records) == [("1x32", "pass")]
    (worker,) = Scripted.made
    assert worker.ended == [0.0]  # at once


def test_a_failure_whose_shrinking_ends_the_host_stays(kernels, tmp_path):
    cases = [replace(QUANTIZE, shape=(rows, 32), recipe=recipe) for rows, recipe in ((32, "nvfp4"), (32, "mxfp4"))]
    settings = Settings("pool_kernels:Fragile", failures=str(tmp_path / "failures"))
    first, second = run_cases(cases, settings, lambda record: None)
    note = "not shrunk: at another shape, crash: the process died (exit status 6)"
    assert (first["verdict"], first["save_note"], first["shrunk"]) == ("fail", note, "")
    assert (second["verdict"], second["save_note"], second["shrunk"]) == ("fail", "", "")
    assert [load(tmp_path / record["saved"]).case.shape for record in (first, second)] == [(32, 32)] * 2


def test_a_worker_runs_a_task_on_the_inputs_of_its_seed():
    records = []
    run_tasks([Task(QUANTIZE, seed) for seed in (3, 8)], Settings("reference", seed=5), records.append)
    assert [record["seed"] for record in records] == [3, 8]
    right = [run_case(QUANTIZE, load_backend("reference"), seed=seed).input_digest for seed in (3, 8)]
    assert [record["input_digest"] for record in records] == right
    assert len(set(right)) == 2


def test_every_worker_that_dies_is_replaced(scripted):
    records = scripted(["die", "record", "die"], 3)
    assert verdicts(records) == [("1x32", "crash"), ("2x32", "pass"), ("3x32", "crash")]
    assert records[0]["message"] == f"the judge of the case died ({SIGKILL}): the other side closed the connection"
    assert len(Scripted.made) == 2  # the last worker is not replaced


def test_a_worker_that_cannot_start_a_host_is_replaced(scripted):
    records = scripted(["record", "last record", "record"], 3)
    assert verdicts(records) == [("1x32", "pass"), ("2x32", "pass"), ("3x32", "pass")]
    first, second = Scripted.made
    assert first.ended == [0.0]
    assert second.ready
