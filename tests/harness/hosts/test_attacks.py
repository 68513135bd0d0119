"""Faulty backends: an attack costs its own case, and no wrong result passes.

Every backend of `faulty_backends` runs 20 small cases by the command, over two processes, and under pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.cli import app
from narrowgauge.harness.hosts import starter
from narrowgauge.harness.machine.process import adopt_orphans
from narrowgauge.harness.records.journal import read
from narrowgauge.harness.records.record_check import record_problems
from narrowgauge.harness.running import supervisor
from narrowgauge.harness.running.runner import run_case
from tests.harness import small_toml
from tests.harness.hosts import more_attacks
from tests.harness.hosts.faulty_backends import (
    ATTACKS,
    FAST_MATH,
    MANY_SHAPES,
    RESULT_SHAPES,
    SHAPES,
    VICTIM,
    Faulty,
)
from tests.paths import PLUGIN, ROOT

MODULE = "tests.harness.hosts.faulty_backends"
LIMIT = 8
"""Seconds that a case may take."""
BOUND = 150
"""Seconds that a run may take: a case that hangs takes `LIMIT`, and the machine may be busy."""
NAMES = [*ATTACKS, "fast_math_library"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that was linked with -ffast-math."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("library")
    (folder / "fast.cpp").write_text('extern "C" int answer() { return 42; }\n')
    subprocess.run(
        ["g++", "-O1", "-ffast-math", "-shared", "-fPIC", "-o", "fast.so", "fast.cpp"], cwd=folder, check=True
    )
    return folder / "fast.so"


@pytest.fixture
def folder(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of runs. No run of the test leaves a process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv(FAST_MATH, str(library))
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")
    (tmp_path / "cases").mkdir()
    adopt_orphans()  # processes that a run leaves become children of this process
    starter.starter().server(supervisor.SERVER)  # all runs of this process share both processes
    until = time.monotonic() + 60
    while len(before := descendants()) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    yield tmp_path
    until = time.monotonic() + 20
    while (left := {pid: command(pid) for pid in descendants() - before}) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


def descendants() -> set[int]:
    """Processes that this process or its descendants started, without zombies."""
    found, rest = set(), [os.getpid()]
    while rest:
        parent = rest.pop()
        for pid in starter.children(parent):
            rest.append(pid)
            if command(pid):
                found.add(pid)
    return found


def command(pid: int) -> str:
    """Command line of a process. Empty for a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


_rights: dict[tuple[int, int], Any] = {}


def right_record(shape: tuple[int, int]) -> Any:
    """The record of a right backend in this process."""
    if shape not in _rights:
        case = case_from_labels("quantize", "nvfp4", shape, "bf16", "normal")
        _rights[shape] = run_case(case, Backend.local("right", Faulty({})))
    return _rights[shape]


def check(shapes: list[tuple[int, int]], wanted: dict[tuple[int, int], frozenset[str]], *, lasting: bool) -> list[Any]:
    """The records of the run in the current folder: a record per case, and passes with the right digests alone."""
    lines = Path("reports/latest/records.jsonl").read_text().splitlines()
    cases = [line for line in lines if line.startswith('{"case"')]
    assert len(cases) == len(shapes), "a case has no record, or several"
    run = read(Path("reports/latest"))
    assert run.missing == []
    for record in run.records:
        shape = tuple(map(int, record["shape"].split("x")))
        right = right_record(shape)
        text = (record["case"], record["verdict"], record["message"])
        if record["verdict"] == "pass":
            assert record["output_digest"] == right.output_digest, text
            assert record["input_digest"] == right.input_digest, text
        assert record_problems(record) == [], text
        if shape in wanted:
            assert record["verdict"] in wanted[shape], text
        elif not lasting:
            assert record["verdict"] == "pass", text
    return run.records


def run(way: str, name: str, module: str = MODULE) -> tuple[int, str]:
    """Exit status and output of a run."""
    backend, limit = f"{module}:{name}", ["--timeout", str(LIMIT)]
    if way == "pytest":
        words = ["-p", PLUGIN, "-p", "no:cacheprovider", "-q", "--ng-cases", "cases", "--ng-backend", backend, *limit]
        return int(pytest.main(words)), ""
    result = CliRunner().invoke(app, ["run", "cases", "--backend", backend, *limit, "-n", way])
    return result.exit_code, result.output + (repr(result.exception) if result.exception else "")


@pytest.mark.long
@pytest.mark.parametrize("way", ["1", "2", "pytest"])
@pytest.mark.parametrize("name", NAMES)
def test_an_attack_costs_its_own_case(name: str, way: str, folder: Path) -> None:
    (folder / "cases" / "small.toml").write_text(small_toml.matrix(shape=SHAPES, dtype="bf16"))
    attack = ATTACKS.get(name)
    wanted = {} if attack is None else {VICTIM: attack.verdicts}
    start = time.monotonic()
    status, output = run(way, f"one_{name}")
    assert time.monotonic() - start < BOUND
    records = check(SHAPES, wanted, lasting=attack is not None and attack.lasting)
    assert status == int(not all(record["verdict"] in ("pass", "unsupported") for record in records)), output
    assert not (folder / "pickled").exists()


@pytest.mark.long
def test_many_attacks_in_a_run(folder: Path) -> None:
    clean = [(16, 32 * n + 16) for n in range(len(MANY_SHAPES))]
    shapes = [shape for pair in zip(clean, MANY_SHAPES.values(), strict=True) for shape in pair]
    (folder / "cases" / "small.toml").write_text(small_toml.matrix(shape=shapes, dtype="bf16"))
    status, output = run("2", "many")
    assert status == 1, output
    check(shapes, {shape: ATTACKS[name].verdicts for name, shape in MANY_SHAPES.items()}, lasting=False)


@pytest.mark.parametrize("way", ["1", *(pytest.param(way, marks=pytest.mark.long) for way in ("2", "pytest"))])
def test_results_of_any_kind_cost_their_own_case(way: str, folder: Path) -> None:
    shapes = list(RESULT_SHAPES.values())
    (folder / "cases" / "small.toml").write_text(small_toml.matrix(shape=shapes, dtype="bf16"))
    status, output = run(way, "results")
    assert status == 1, output
    check(shapes, {shape: ATTACKS[name].verdicts for name, shape in RESULT_SHAPES.items()}, lasting=False)


@pytest.mark.parametrize("way", ["1", *(pytest.param(way, marks=pytest.mark.long) for way in ("2", "pytest"))])
def test_more_attacks_in_a_run(way: str, folder: Path) -> None:
    """Cases without an attack lie between the documented attacks."""
    shapes = [
        shape for pair in zip_longest(more_attacks.PLACES.values(), more_attacks.CLEAN) for shape in pair if shape
    ]
    (folder / "cases" / "small.toml").write_text(small_toml.matrix(shape=shapes, dtype="bf16"))
    status, output = run(way, "all", more_attacks.__name__)
    assert status == 1, output
    wanted = {shape: more_attacks.ALL[name].verdicts for name, shape in more_attacks.PLACES.items()}
    check(shapes, wanted, lasting=False)
