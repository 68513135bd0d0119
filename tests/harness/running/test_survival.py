"""Faults of a kernel and ends of a run: a fault costs its own case, and the run goes on.

To see that it always does: `for i in $(seq 20); do pytest -q -n 0 -k test_survival || break; done`.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowgauge.harness.cli import app
from narrowgauge.harness.pytest_plugin import sandbox
from narrowgauge.harness.records.journal import JOURNAL_NAME, Journal, JournalError, RecordedRun, read
from narrowgauge.harness.records.record import new_record
from narrowgauge.harness.records.saved_failure import load
from narrowgauge.harness.report.report import ReportError, write_journaled
from narrowgauge.harness.running.pool import Settings, Task
from tests.harness.sample_backends import QUANTIZE
from tests.paths import PLUGIN, ROOT

pytest_plugins = ["pytester"]

LIMIT = 6
"""Seconds of a case, on a machine that may be busy with further tests; only the one that hangs takes them."""

KERNELS = """
import ctypes, os, resource, time
import numpy as np
from narrowgauge.reference import ops

libc = ctypes.CDLL(None)


class Backend:
    def quantize(self, x, recipe):
        q = ops.quantize(x, recipe)
        match x.shape[0]:
            case 17:
                ctypes.string_at(0)
            case 18:
                libc.sleep(600)  # in C: no exception of Python's ends it
            case 21:
                os._exit(6)
            case 15:
                x[0, 0] += 1
            case 23:
                resource.setrlimit(resource.RLIMIT_AS, (1 << 38, 1 << 38))
                np.zeros(1 << 37)
            case 24:
                raise ValueError("not today")
            case 22:
                os.kill(os.getpid(), 9)  # as the system does where memory runs out
            case 25:
                raise KeyboardInterrupt
            case rows if rows < 15:  # in smaller shapes too, which its search comes to
                print("a word of the kernel's")
                q.codes[0, 0] ^= 1
        return q


class Counting(Backend):
    # Writes the rows of each case into a file; at 18 rows it waits for the file `go`.
    def quantize(self, x, recipe):
        with open("seen", "a") as file:
            file.write(f"{x.shape[0]}\\n")
        while x.shape[0] == 18 and not os.path.exists("go"):
            time.sleep(0.02)
        return ops.quantize(x, recipe)
"""

CASES = """
[[matrix]]
operation = "quantize"
tier = "quick"
recipe = "nvfp4"
shape = {shapes}
dtype = "bf16"
inputs = "normal"
"""

ALL = (*range(14, 19), *range(21, 27))
SIGKILL = "signal SIGKILL, as where memory runs out"
EXPECTED = {
    14: ("fail", r"codes: 1 of 448 codes differ, each by 1 step, at row 0, column 0"),
    15: ("error", r"writes to its input: x, at byte 0 of 960"),
    16: ("pass", ""),
    17: ("crash", r"the process died \(signal SIGSEGV\) at faulty\.py:14 in quantize"),
    18: ("timeout", rf"no result after {LIMIT} s at faulty\.py:16 in quantize"),
    21: ("crash", r"the process died \(exit status 6\)"),
    22: ("crash", rf"the process died \({SIGKILL}\)"),
    23: ("error", r"quantize raised MemoryError: Unable to allocate 1\.00 TiB .* \(at faulty\.py:\d+\)"),
    24: ("error", r"quantize raised ValueError: not today \(at faulty\.py:\d+\)"),
    25: ("crash", r"the process died \(exit status 1\)"),
    26: ("pass", ""),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder: faulty.py, and cases/faults.toml with a case for each number of rows."""
    (tmp_path / "faulty.py").write_text(KERNELS)
    move_to(tmp_path, monkeypatch)
    select(tmp_path, ALL)
    return tmp_path


def move_to(folder, monkeypatch):
    """Make a folder the current folder: runs find its modules, and no module of this run of pytest."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{folder}")
    monkeypatch.setenv("COLUMNS", "200")
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")  # it takes a second and more to import


def select(folder, rows):
    (folder / "cases").mkdir(exist_ok=True)
    (folder / "cases" / "faults.toml").write_text(CASES.format(shapes=[[n, 32] for n in rows]))


def case_of(rows):
    return replace(QUANTIZE, shape=(rows, 32))


def rows_of(record):
    return int(record["shape"].partition("x")[0])


def check(records, expected=EXPECTED):
    """Every case has a single record with the expected verdict and message."""
    assert sorted(map(rows_of, records)) == sorted(expected)
    for record in records:
        verdict, message = expected[rows_of(record)]
        assert record["verdict"] == verdict, record
        assert re.fullmatch(message, record["message"], re.DOTALL), record["message"]
        written = record["message"].startswith("writes to its input")
        assert [found["cause"] for found in record["explanations"]] == ["changes-its-input"] * written or not written


def narrowgauge(*words):
    return CliRunner().invoke(app, ["run", *map(str, words)])


# What a kernel does.


@pytest.mark.long
def test_faults_cost_their_own_cases_in_a_run_of_the_command(folder):
    result = narrowgauge("--backend", "faulty:Backend", "-n", 2, "--timeout", LIMIT)
    assert result.exit_code == 1, result.output
    assert f"{len(ALL)} cases in" in result.output
    check(read(Path("reports/latest")).records)
    assert "26x32" in Path("reports/latest/index.html").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    "workers",
    [pytest.param([], marks=pytest.mark.long, id="in one process"), pytest.param(["-n", "1"], id="by a worker")],
)
def test_faults_cost_their_own_cases_under_pytest(folder, workers):
    """The timeout is pytest-timeout's, by its method that would end the process; workers of xdist are never replaced.

    In a process of its own, which must survive.
    """
    words = ["--ng-cases", "cases", "-p", PLUGIN, "-p", "no:cacheprovider", "--ng-backend", "faulty:Backend", *workers]
    words += ["--timeout", str(LIMIT), "--timeout-method", "thread"]
    expected = {rows: EXPECTED[rows] for rows in ((14, 18, 22, 25, 26) if workers else ALL)}
    select(folder, expected)
    words += ["--max-worker-restart", "0"] if workers else ["--junitxml", "junit.xml"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 1, done.stdout + done.stderr
    passed = sum(verdict == "pass" for verdict, _ in expected.values())
    assert f"{len(expected) - passed} failed, {passed} passed" in done.stdout
    assert f"{len(expected)} cases; report: " in done.stdout
    assert done.stdout.count("report: ") == 1
    assert "a word of the kernel's" in done.stdout
    assert "INTERNALERROR" not in done.stdout
    records = read(folder / "reports" / "latest").records
    check(records, expected)
    (wrong,) = [record for record in records if rows_of(record) == 14]
    assert load(folder / wrong["saved"]).case.shape == (1, 16)  # written by a worker, named by the controller


STUCK = """
import ctypes, os, threading


def deep(x):
    return ctypes.PyDLL(None).sleep(600)  # with the lock of the interpreter


class Stuck:
    def quantize(self, x, recipe):
        match x.shape[0]:
            case 16:
                deep(x)
            case 17:
                os.abort()
            case 18:
                thread = threading.Thread(target=deep, args=(x,))
                thread.start()
                thread.join()
"""


def test_a_crash_and_a_timeout_name_the_line_of_the_user(folder, monkeypatch):
    """In the record with the stack, without the frames of the host; on the terminal and on the page; at the import."""
    (folder / "stuck.py").write_text(STUCK)
    select(folder, (16, 17))
    result = narrowgauge("--backend", "stuck:Stuck", "-n", 1, "--timeout", 6)
    deep, crash = sorted(read(Path("reports/latest")).records, key=rows_of)
    assert deep["message"] == "no result after 6 s at stuck.py:6 in deep"
    assert crash["message"] == "the process died (signal SIGABRT) at stuck.py:15 in quantize"
    (note,) = deep["notes"]
    assert note == {
        "cause": "stack", "sentence": "innermost call first\nstuck.py:6 in deep\nstuck.py:13 in quantize"
    }  # fmt: skip
    assert [note["sentence"].splitlines()[1:] for note in crash["notes"]] == [["stuck.py:15 in quantize"]]
    assert "(signal SIGABRT) at stuck.py:15 in quantize\n" in result.output
    assert "stack, innermost call first\n  stuck.py:" in result.output
    assert " note" not in result.output  # it is no observation beside the verdict
    assert "stuck.py:6 in deep\\n  stuck.py:13 in quantize" in Path("reports/latest/index.html").read_text()
    (folder / "dying.py").write_text("import os\n\nos.abort()\n")
    assert (
        "backend dying:X: the process died (signal SIGABRT) at dying.py:3 in <module>"
        in narrowgauge("--backend", "dying:X").stderr
    )


# What ends a run.


def start(*words):
    """A run with the Counting backend, when it waits in the case of 18 rows."""
    # A shell ignores Ctrl-C in background jobs and in their child processes.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", *words, "--ng-backend" if words[0] == "pytest" else "--backend", "faulty:Counting"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    until = time.monotonic() + 120
    while not (Path("seen").exists() and "18\n" in Path("seen").read_text() and len(written()) == 3):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, "the run does not come to the case of 18 rows"
        time.sleep(0.05)
    return process


def written():
    """Lines of the journal, without those of the time and of the loaded sources."""
    path = Path("reports/latest") / JOURNAL_NAME
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if not line.startswith(('{"elapsed"', '{"loaded"'))]


def seen():
    """How often the backend saw each case, by rows: every case runs twice."""
    lines = list(map(int, Path("seen").read_text().split()))
    return {rows: lines.count(rows) for rows in sorted(set(lines))}


@pytest.mark.long
def test_a_killed_run_leaves_its_records_and_is_resumed(folder, pytester, monkeypatch):
    """No second run takes its folder. After SIGKILL and --resume no case has run twice, and the report has all."""
    monkeypatch.chdir(folder)
    select(folder, range(16, 21))
    process = start("narrowgauge", "run", "-n", "1")
    refused = narrowgauge("--backend", "reference")
    assert refused.exit_code == 2, refused.output
    assert "reports/latest" in refused.stderr
    assert "--report-dir" in refused.stderr
    words = ["-p", PLUGIN, "-p", "no:cacheprovider", "-p", "no:xdist", "--ng-backend", "reference"]
    done = pytester.runpytest_inprocess("--rootdir", folder, "--ng-cases", "cases", *words)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert "--ng-report-dir" in done.stderr.str()
    process.kill()
    process.communicate()
    run = read(Path("reports/latest"))
    assert [rows_of(record) for record in run.records] == [16, 17]
    assert [case.split("/")[2] for case in run.missing] == ["18x32", "19x32", "20x32"]
    with (Path("reports/latest") / JOURNAL_NAME).open("a") as file:
        file.write('{"elapsed": 5000.0}\n{"case": "cut sho')
    before = seen()
    Path("go").touch()
    result = narrowgauge("--backend", "faulty:Counting", "-n", 1, "--resume")
    assert result.exit_code == 0, result.output
    assert "2 of 5 cases are done" in result.output
    assert "5 cases in 83 min" in result.output  # of both parts
    run = read(Path("reports/latest"))
    assert [rows_of(record) for record in run.records] == [16, 17, 18, 19, 20]
    assert run.missing == []
    assert (seen()[16], seen()[17]) == (before[16], before[17])
    result = narrowgauge("--backend", "faulty:Counting", "--resume", "-k", "16x32 or 17x32")
    assert result.exit_code == 2
    assert "this one selects no longer 3 cases, the first quantize/nvfp4/18x32/bf16/normal. Run" in result.stderr
    result = narrowgauge("--backend", "reference", "--resume", "--seed", 3)
    assert result.exit_code == 2
    assert "backend was faulty:Counting, and is reference; seed was 0, and is 3; " in result.stderr


# A journal, and a disk that is full.


def header(**changes):
    given = {
        "backend": "b", "device": "cpu", "seed": 0, "cases": [case_of(n).id for n in (16, 17, 18)],
        "environment": {"GPU": "none", "kernel flags": "-O2"}, "sources": {"kernels": "01", "reference": "02"},
    }  # fmt: skip
    return RecordedRun(**(given | changes))


def record_of(rows, **changes):
    record = new_record(case_of(rows), backend="b", device="cpu", seed=0)
    record.verdict, record.message = "error", "not today"
    return record.to_dict() | changes


@pytest.fixture
def written_run(tmp_path):
    """A folder with the journal of three cases, of which two are done."""
    made = Journal(tmp_path, header)
    for rows in (16, 17):
        made.add(record_of(rows, sqnr_db=float("inf")))
    made.close()
    return tmp_path


def test_a_run_reads_as_it_was_written(written_run):
    run = read(written_run)
    assert (
        run
        == read(written_run / JOURNAL_NAME)
        == header(records=[record_of(n, sqnr_db=float("inf")) for n in (16, 17)])
    )
    assert run.missing == [case_of(18).id]


def test_the_failures_that_a_run_saved_go_with_its_journal(tmp_path):
    """The first record of another run deletes the failures of the run before, except files of others and new files."""
    folder = tmp_path / "failures"
    folder.mkdir()
    names = ("old", "again", "mine")
    for name in names:
        (folder / f"{name}.safetensors").write_bytes(b"1")
        os.utime(folder / f"{name}.safetensors", ns=(1, 1))
    first = Journal(tmp_path, header)
    for rows, name in zip((16, 17), names, strict=False):
        first.add(record_of(rows, saved=f"somewhere/failures/{name}.safetensors"))
    first.close()
    resumed = Journal.resumed(tmp_path, header())
    resumed.add(record_of(18))
    resumed.close()
    another = Journal(tmp_path, header)
    (folder / "again.safetensors").write_bytes(b"2")
    assert len(list(folder.iterdir())) == 3
    another.add(record_of(16))
    assert sorted(path.stem for path in folder.iterdir()) == ["again", "mine"]
    another.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "c"}, "backend was b, and is c"),
        ({"device": "cuda"}, "device was cpu, and is cuda"),
        ({"seed": 1}, "seed was 0, and is 1"),
        ({"shard": "1/2"}, "shard was None, and is 1/2"),
        ({"schedules": 8}, "--schedules was 1, and is 8"),
        ({"sanitize": True}, "--sanitize was False, and is True"),
        ({"environment": {"GPU": "H200", "kernel flags": "-O2"}}, "GPU was none, and is H200"),
        ({"sources": {"kernels": "01", "reference": "03"}}, "the source of reference has changed"),
        ({"cases": [case_of(16).id]}, f"this one selects no longer 2 cases, the first {case_of(17).id}"),
        ({"cases": [*header().cases, case_of(9).id]}, f"this one selects besides 1 case, the first {case_of(9).id}"),
    ],
)
def test_another_run_is_not_gone_on_with(written_run, changes, words):
    with pytest.raises(JournalError) as raised:
        Journal.resumed(written_run, header(**changes))
    for part in (JOURNAL_NAME, words, "--resume", "--report-dir"):
        assert part in str(raised.value)


def test_a_run_ends_if_its_journal_does_not_fit(folder, monkeypatch):
    """The command ends with status 2. The records before stay, and the run counts as incomplete."""
    select(folder, (16, 28))
    records = [record_of(n, backend="reference") for n in (16, 28)]

    def full(cases, settings, on_record, on_loaded):
        on_record(records[0])
        monkeypatch.setattr(os, "write", _no_space)
        on_record(records[1])

    monkeypatch.setattr("narrowgauge.harness.tools.run_cases.run_cases", full)
    result = narrowgauge("--backend", "reference")
    monkeypatch.undo()
    assert result.exit_code == 2
    assert "cannot be written: No space left on device. The records before are in it" in result.stderr
    assert len(read(folder / "reports" / "latest").records) == 1


def _no_space(*_, **__):
    raise OSError(28, "No space left on device")


def in_pytest(pytester, monkeypatch, folder):
    """A run of pytest over the cases of 16 and 26 rows, in this process."""
    monkeypatch.setattr("narrowgauge.harness.pytest_plugin.session.in_process", lambda config: True)
    select(folder, (16, 26))
    words = ["-p", PLUGIN, "-p", "no:cacheprovider", "-p", "no:xdist", "--ng-backend", "reference"]
    return pytester.runpytest_inprocess("--rootdir", folder, "--ng-cases", folder / "cases", *words)


@pytest.mark.long
@pytest.mark.usefixtures("compiler")
def test_pytest_ends_if_its_journal_does_not_fit(folder, pytester, monkeypatch):
    add = Journal.add

    def full(self, record):
        if rows_of(record) == 26:
            monkeypatch.setattr(os, "write", _no_space)
        add(self, record)

    monkeypatch.setattr(Journal, "add", full)
    result = in_pytest(pytester, monkeypatch, folder)
    monkeypatch.undo()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*Exit: *cannot be written: No space left on device. The records before are in it*"])
    assert len(read(folder / "reports" / "latest").records) == 1


# Under pytest, without a process.


def test_a_worker_that_died_between_two_cases_is_replaced(folder):
    runner = sandbox.Sandbox(Settings("faulty:Backend"))
    task = Task(case_of(16), 0)
    given = {"timeout": 60.0, "sharing": 1, "note": lambda record: None}
    try:
        assert runner.run(task, **given)["verdict"] == "pass"
        first = runner._worker
        assert first.end() == -signal.SIGKILL
        assert runner.run(task, **given)["verdict"] == "pass"
        second = runner._worker
        os.remove(folder / "faulty.py")
        assert second.end() == -signal.SIGKILL
        record = runner.run(task, **given)
        assert record["verdict"] == "error"
        assert "module faulty cannot be imported" in record["message"]
        runner._worker = None
        assert runner.run(task, **given)["message"] == record["message"]  # and it is not tried again
    finally:
        runner.close()


@pytest.fixture
def small_disk():
    """This process cannot write a file beyond 2 000 bytes behind what `full` is told."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def full(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield full
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, old)


def test_a_full_disk_costs_the_record_that_did_not_fit(tmp_path, small_disk):
    kept = Journal(tmp_path, header)
    kept.add(record_of(16))
    size = (tmp_path / JOURNAL_NAME).stat().st_size
    small_disk(size + 100)
    with pytest.raises(JournalError, match=r"cannot be written: File too large\. The records before are in it"):
        kept.add(record_of(17))
    assert (tmp_path / JOURNAL_NAME).stat().st_size == size
    small_disk(size + 10_000)
    kept.add(record_of(18))
    assert [record["shape"] for record in read(tmp_path).records] == ["16x32", "18x32"]


def test_a_report_that_does_not_fit_leaves_the_journal(written_run, small_disk):
    small_disk(2000)
    with pytest.raises(ReportError) as raised:
        write_journaled(read(written_run).records, {}, written_run, elapsed=1.0)
    for words in (str(written_run), "File too large", "2 records", JOURNAL_NAME, "--resume"):
        assert words in str(raised.value)
    assert [path.name for path in written_run.iterdir()] == [JOURNAL_NAME]
