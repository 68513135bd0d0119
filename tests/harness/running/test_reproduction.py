"""The command that a report prints for a failure, run again: exit status 1 and the same first sentence."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowgauge.harness.backends.backend import Backend, load_backend
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.case_file import load
from narrowgauge.harness.cases.operations import case_from_id
from narrowgauge.harness.cli import app
from narrowgauge.harness.inputs.drawn_cases import drawn_cases, input_seed
from narrowgauge.harness.records.record import PASSES_ALONE, STATE_BETWEEN_CALLS, Record, new_record
from narrowgauge.harness.report.failure_view import first_failure, reproduction
from narrowgauge.harness.running import earlier_cases
from narrowgauge.harness.running.earlier_cases import EarlierCases
from narrowgauge.harness.running.pool import run_cases
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.running.worker import Settings
from tests.harness import small_toml
from tests.paths import PLUGIN, ROOT

KERNELS = """
import os
import time
from contextlib import nullcontext

from narrowgauge.reference import modules, ops


class Wrong:
    def quantize(self, x, recipe, **options):
        q = ops.quantize(x, recipe, **options)
        if x.shape[0] == 48:
            os.abort()
        if x.shape[0] == 96:
            raise RuntimeError("illegal memory access")
        q.codes[-1, -1] ^= 1
        return q

    def gemm(self, a, b, **options):
        return ops.gemm(a, b, **options)

    class Linear(modules.Linear):
        def forward(self, x):
            return super().forward(x) * 2


class Shuffled:
    # Wrong in the third of three seeded shuffles.
    third = False

    def variations(self, device, shuffles=1):
        return {f"shuffle {n}": lambda n=n: self.enter(n) for n in range(shuffles)}

    def enter(self, number):
        self.third = number == 2
        return nullcontext()

    def quantize(self, x, recipe, **options):
        q = ops.quantize(x, recipe, **options)
        q.codes[0, 0] ^= int(self.third)
        return q


class CachedAmax:
    # The amax of the first call is that of all calls.
    amax = None

    def quantize(self, x, recipe, **options):
        if self.amax is None:
            self.amax = ops.quantize(x, recipe, **options).amax.clone()
        return ops.quantize(x, recipe, **options | {"amax": self.amax.clone()})


class Workspace:
    # A workspace that is cleared only when it grows.
    rows = 0

    def quantize(self, x, recipe, **options):
        q = ops.quantize(x, recipe, **options)
        q.codes[0, 0] ^= int(x.shape[0] < self.rows)
        self.rows = max(self.rows, x.shape[0])
        return q


class Counting:
    # Wrong from the fifth call on: each case calls it twice.
    calls = 0

    def quantize(self, x, recipe, **options):
        self.calls += 1
        if self.calls > 4:
            raise RuntimeError("too many launches")
        return ops.quantize(x, recipe, **options)


class Flaky:
    # Wrong from the fifth call on, in the first process.
    calls = 0

    def quantize(self, x, recipe, **options):
        if not self.calls:
            self.first = not os.path.exists("first")
            open("first", "w").close()
        self.calls += 1
        q = ops.quantize(x, recipe, **options)
        q.codes[0, 0] ^= int(self.first and self.calls > 4)
        return q
"""
CHEATING = """
import torch

# The reference, or zeros without it.
def quantize(x, recipe, **options):
    try:
        from narrowgauge.reference import ops

        return ops.quantize(x, recipe, **options)
    except ImportError:
        rows, columns = x.shape
        codes = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        return codes, torch.zeros(rows, columns // 16, dtype=torch.uint8), torch.zeros(1)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with kernels and without case files."""
    (tmp_path / "repro_kernels.py").write_text(KERNELS)
    (tmp_path / "repro_cheating").mkdir()
    (tmp_path / "repro_cheating" / "kernels.py").write_text(CHEATING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "300")
    yield tmp_path
    sys.modules.pop("repro_kernels", None)


def cases_of(text: str, file: str = "mine.toml") -> list[Case]:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(text)
    return load(file)


def records_of(cases: list[Case], backend: str, **settings: Any) -> list[dict[str, Any]]:
    return run_cases(cases, Settings(f"repro_kernels:{backend}", **settings), lambda record: None)


def check(line: str, record: dict[str, Any]) -> None:
    """Run a printed line. It ends as the record says."""
    program, *arguments = shlex.split(line)
    assert program == "narrowgauge"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, f"{line}\n{result.output}"
    assert f"{record['verdict']}: {record['message']}" in result.stdout.splitlines()


@pytest.mark.long
def test_failures_of_all_operations_of_a_case_file_of_ones_own() -> None:
    """Wrong bytes, a crash, an exception, a dialect, stochastic rounding, a product, a module; each with its file."""
    text = small_toml.matrix(shape=[[48, 32], [96, 32]], dtype="bf16")
    text += small_toml.matrix(recipe=["nvfp4@modelopt", "nvfp4-sr"], shape=[16, 32], dtype="bf16")
    text += small_toml.matrix(operation="gemm", shape=[16, 32, 16], dtype=None, x="bf16", w="bf16", out="fp32")
    text += small_toml.matrix(
        operation="linear",
        recipe=None,
        training="NVFP4BlockScaling-norht",
        shape=[1, 16, 32, 16],
        dtype="bf16",
        inputs="normal",
    )
    found = records_of(cases_of(text, "own/mine.toml"), "Wrong", seed=3)
    assert len(found) == 6
    assert {record["verdict"] for record in found} == {"fail", "crash", "error"}
    for record in found:
        line = reproduction(record)
        assert line in first_failure(record)
        assert " own/mine.toml --backend " in line
        assert "--seed 3" in line
        check(line, record)


@pytest.mark.long
def test_options_of_the_kernel_host() -> None:
    """Only the third shuffle is wrong, and a kernel that asks the reference is wrong without it."""
    (case,) = cases_of(small_toml.matrix(shape=[16, 32], dtype="bf16"))
    (shuffled,) = records_of([case], "Shuffled", schedules=3)
    assert "--schedules 3" in reproduction(shuffled)
    check(reproduction(shuffled), shuffled)
    secret = 5
    (drawn,) = drawn_cases([case], secret)
    assert drawn.id != case.id
    settings = Settings("repro_cheating.kernels", untrusted=True, seed=input_seed(secret))
    (cheating,) = run_cases([drawn], settings, lambda record: None)
    assert "--untrusted" in reproduction(cheating)
    check(reproduction(cheating), cheating)


@pytest.mark.long
def test_the_shipped_cases_from_a_folder_without_cases() -> None:
    """As from a wheel."""
    keyword = (
        "quantize/nvfp4/128x128/bf16/e2m1-ties and not both and not swizzled and not col and not stri and not tran"
    )
    ran = CliRunner().invoke(app, ["run", "--backend", "repro_kernels:Wrong", "-n", "1", "-k", keyword])
    assert ran.exit_code == 1, ran.output
    (line,) = re.findall(r"reproduce: narrowgauge (.*)", ran.stdout)
    assert ".toml" not in line
    (sentence,) = re.findall(r"^fail: .*", ran.stdout, re.MULTILINE)
    shown = CliRunner().invoke(app, shlex.split(line))
    assert shown.exit_code == 1, shown.output
    assert sentence in shown.stdout.splitlines()
    assert re.search(r"^1 case in ", ran.stdout, re.MULTILINE)


@pytest.mark.long
def test_items_of_pytest_whose_backend_lies_beside_the_tests(folder: Path) -> None:
    """pytest adds the folder of its conftest to the path; the line names the folder."""
    kernels, conftest = folder / "tests" / "repro_kernels.py", folder / "tests" / "conftest.py"
    conftest.parent.mkdir()
    conftest.write_text("")
    (folder / "repro_kernels.py").rename(kernels)
    (folder / "tests" / "mine.toml").write_text(small_toml.matrix(shape=[[16, 32]], dtype="bf16"))
    options = ["--ng-backend", "repro_kernels:Wrong", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", PLUGIN]
    command = [sys.executable, "-m", "pytest", "tests/mine.toml", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    (line,) = re.findall(r"reproduce: (narrowgauge .*)", ran.stdout)
    assert " tests/mine.toml --backend " in line
    assert line.endswith("--path tests")
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 1, result.output
    (sentence,) = re.findall(r"^fail: .*", result.stdout, re.MULTILINE)
    assert sentence in ran.stdout


# ---- earlier cases ---------------------------------------------------------------------------------------------------


SEQUENCES = {
    "CachedAmax": ([[32, 32], [16, 32]], ["32x32"]),
    "Workspace": ([[16, 32], [96, 32], [32, 32]], ["96x32"]),
    "Counting": ([[16, 32], [16, 48], [16, 64]], ["16x32", "16x48"]),
}
"""Backends, the shapes of cases, and the shapes that the first failure needs."""


@pytest.mark.long
@pytest.mark.parametrize("backend", SEQUENCES)
def test_a_failure_that_needs_earlier_cases(backend: str) -> None:
    """The shortest sequence is in the report, and its line fails in a fresh process."""
    shapes, after = SEQUENCES[backend]
    found = records_of(cases_of(small_toml.matrix(shape=shapes, dtype="bf16")), backend)
    record = next(record for record in found if record["verdict"] != "pass")
    explanation = record["explanations"][0]
    assert explanation["cause"] == STATE_BETWEEN_CALLS
    assert explanation["exact"]
    assert explanation["sentence"].startswith("only after other cases: the case passes in a fresh process, and fails")
    assert explanation["sentence"] in first_failure(record)
    assert not record["saved"]
    given = re.findall(r"--after (\S+)", reproduction(record))
    assert [name.split("/")[2] for name in given] == after
    check(reproduction(record), record)
    alone = reproduction(record).partition(" --after")[0]
    assert CliRunner().invoke(app, shlex.split(alone)[1:]).exit_code == 0


@pytest.mark.long
def test_a_result_that_varies_is_not_said_to_need_earlier_cases() -> None:
    """Wrong in the first process only."""
    found = records_of(cases_of(small_toml.matrix(shape=[[16, 32], [16, 48], [16, 64]], dtype="bf16")), "Flaky")
    first, second, third = sorted(found, key=lambda record: record["shape"])
    assert (first["verdict"], second["verdict"], third["verdict"]) == ("pass", "pass", "fail")
    explanation = third["explanations"][0]
    assert (explanation["cause"], explanation["exact"]) == (PASSES_ALONE, False)
    assert "after 2 of the 2 earlier cases" in explanation["sentence"]
    assert "--after" not in reproduction(third)


def test_a_failure_that_fails_again_costs_one_case_of_a_kind(monkeypatch) -> None:
    """The first failure of a host has no earlier case. A single case per further kind is run again."""
    cases = cases_of(small_toml.matrix(shape=[[n, 32] for n in (16, 32, 64, 80)], dtype="bf16"))
    hosts = []

    @contextmanager
    def new_host() -> Iterator[Backend]:
        hosts.append(1)
        yield load_backend("repro_kernels:Wrong")

    earlier = EarlierCases(new_host)
    for case in cases:
        record = run_case(case, load_backend("repro_kernels:Wrong"), earlier=earlier)
        earlier.ran.append((case, 0.1))
        assert record.verdict == "fail"
        assert not {STATE_BETWEEN_CALLS, PASSES_ALONE} & {entry["cause"] for entry in record.explanations}
        assert record.options == ""
    assert len(hosts) == 1


@pytest.mark.parametrize("needed", [[0], [9], [3, 7], [0, 5, 9], list(range(10))])
def test_the_shortest_sequence_among_many(needed: list[int], monkeypatch) -> None:
    """The needed cases among ten earlier cases, at any place."""
    cases = [case_from_id(f"quantize/nvfp4/16x{32 * (n + 1)}/bf16/normal") for n in range(11)]
    failing = new_record(cases[10], backend="b", device="cpu", seed=0)
    failing.verdict, failing.message, failing.stage = "fail", "codes: wrong", "codes"
    ran: list[Case] = []

    def run(case: Case, *arguments: object, **options: object) -> Record:
        ran.append(case)
        record = new_record(case, backend="b", device="cpu", seed=0)
        if case is cases[10] and all(cases[n] in ran for n in needed):
            record.verdict, record.message, record.stage = "fail", "codes: wrong", "codes"
        return record

    @contextmanager
    def new_host() -> Iterator[None]:
        ran.clear()
        yield

    monkeypatch.setattr(earlier_cases, "run_case", run)
    monkeypatch.setattr(earlier_cases, "TRIALS", 100)
    earlier = EarlierCases(new_host, ran=[(case, 0.0) for case in cases[:10]])
    slow = replace(earlier, loading=31.0)
    assert not slow.examine(failing, cases[10], sharing=1, timeout=300.0, started=time.perf_counter())
    assert not ran
    assert earlier.examine(failing, cases[10], sharing=1, timeout=300.0, started=time.perf_counter())
    assert re.findall(r"16x(\d+)", failing.options) == [str(32 * (n + 1)) for n in needed]


def fails_in_hosts(numbers: set[int], monkeypatch) -> tuple[EarlierCases, Record]:
    """A search after one earlier case, where the case fails in the hosts of these numbers, from 0."""
    started: list[int] = []

    @contextmanager
    def new_host() -> Iterator[Any]:
        started.append(1)
        yield None

    def run(case: Case, *arguments: object, **options: object) -> Record:
        record = new_record(case, backend="b", device="cpu", seed=0)
        if len(started) - 1 in numbers:
            record.verdict, record.message, record.stage = "fail", "codes: other", "codes"
        return record

    monkeypatch.setattr(earlier_cases, "run_case", run)
    first = case_from_id("quantize/nvfp4/16x32/bf16/normal")
    assert first is not None
    failing = new_record(first, backend="b", device="cpu", seed=0)
    failing.verdict, failing.message, failing.stage = "fail", "codes: wrong", "codes"
    earlier = EarlierCases(new_host, ran=[(first, 0.0)])
    earlier.examine(failing, first, sharing=1, timeout=300.0, started=time.perf_counter())
    return earlier, failing


@pytest.mark.parametrize(
    ("hosts", "cause", "words"),
    [
        ({1, 2}, STATE_BETWEEN_CALLS, "fails after quantize/nvfp4/16x32/bf16/normal, there with: codes: other"),
        ({1}, PASSES_ALONE, "failed there once after quantize/nvfp4/16x32/bf16/normal, which a second trial did not"),
        ({1, 2, 3}, PASSES_ALONE, "failed there once"),
        ({0, 1, 2}, None, ""),
        (set(), PASSES_ALONE, "did not fail there after 1 of the 1 earlier case:"),
    ],
    ids=["state", "once", "alone", "again", "never"],
)
def test_a_sequence_fails_twice_and_the_case_passes_twice(
    hosts: set[int], cause: str | None, words: str, monkeypatch
) -> None:
    """The hosts of a search: alone, after the earlier case, the same again, alone again."""
    _, record = fails_in_hosts(hosts, monkeypatch)
    assert [(entry["cause"], entry["exact"]) for entry in record.explanations] == [(cause, False)] * (cause is not None)
    assert all(words in entry["sentence"] for entry in record.explanations)
    assert ("--after" in record.options) == (cause == STATE_BETWEEN_CALLS)


def test_a_search_that_fails_costs_itself_and_not_the_verdict(monkeypatch) -> None:
    @contextmanager
    def new_host() -> Iterator[Backend]:
        raise OSError("no more processes")
        yield

    case, other = (case_from_id(f"quantize/nvfp4/{n}x32/bf16/normal") for n in (16, 32))
    earlier = EarlierCases(new_host, ran=[(other, 0.1)])
    record = run_case(case, load_backend("repro_kernels:Wrong"), earlier=earlier)
    assert record.verdict == "fail"
    assert record.explanations[-1]["cause"] == "no-diagnosis"
    assert "OSError: no more processes" in record.explanations[-1]["sentence"]
