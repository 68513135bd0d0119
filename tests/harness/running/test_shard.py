"""Shards: each case is in a single shard, the same on every machine, with about equal times."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowgauge.harness.cases.case import select
from narrowgauge.harness.cases.case_file import load_all
from narrowgauge.harness.cases.cost import estimated_seconds
from narrowgauge.harness.cases.operations import case_from_id, case_from_labels
from narrowgauge.harness.checks.statistics.holm import count_chance_cases
from narrowgauge.harness.cli import app
from narrowgauge.harness.records.journal import Journal, RecordedRun
from narrowgauge.harness.records.record import new_record
from narrowgauge.harness.running.shard import (
    Shard,
    ShardError,
    digest,
    durations,
    part_of,
    split,
)
from tests.harness import small_toml
from tests.paths import PLUGIN

pytest_plugins = ["pytester"]

SMALL = case_from_labels("quantize", "nvfp4", (16, 32), "bf16", "normal")
CASES = [replace(SMALL, shape=(16 * n, 32), recipe="nvfp4-sr" if n % 4 == 0 else "nvfp4") for n in range(1, 13)]
FILE = small_toml.matrix(recipe=["nvfp4", "nvfp4-sr", "nvfp4-rht"], dtype="bf16")
ALL = [f"quantize/{recipe}/16x{k}/bf16/normal" for recipe in ("nvfp4", "nvfp4-sr", "nvfp4-rht") for k in (32, 48)]


def journal(directory: Path, seconds: dict[str, float | None]) -> Path:
    """The journal of a run of these cases with these durations."""
    run = RecordedRun("reference", "cpu", 0, list(seconds), {}, {})
    written = Journal(directory, lambda: run)
    for case, taken in seconds.items():
        record = new_record(case_from_id(case), backend="reference", device="cpu", seed=0)
        record.verdict, record.message, record.seconds_total = "error", "not today", taken
        written.add(record.to_dict())
    written.close()
    return directory


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_every_case_is_in_one_shard(count):
    parts = [part_of(CASES, Shard(n, count)) for n in range(1, count + 1)]
    assert sorted(case.id for part in parts for case in part.cases) == sorted(case.id for case in CASES)
    assert all(part.cases for part in parts)


def test_a_shard_knows_the_others():
    """The number of chance cases and the selection belong to all cases, in any order of the cases."""
    shuffled = random.Random(0).sample(CASES, len(CASES))
    for number in (1, 2, 3):
        part, again = (part_of(cases, Shard(number, 3)) for cases in (CASES, shuffled))
        assert {case.id for case in part.cases} == {case.id for case in again.cases}
        assert part.cases == [case for case in CASES if case in part.cases]
        assert part.sharing == again.sharing == count_chance_cases(CASES) == 3
        assert part.selection == again.selection == digest(case.id for case in CASES)
    assert part_of(CASES[1:], Shard(1, 3)).selection != part.selection


def test_the_costliest_go_first_to_the_shard_that_has_least():
    costs = {"a": 5.0, "b": 4.0, "c": 3.0, "d": 3.0, "e": 3.0}
    assert split(costs, 2) == [{"a", "d"}, {"b", "c", "e"}]


def test_recorded_durations_divide_and_scale_the_estimates():
    cases = {case.id: case for case in CASES}
    first, second, *others = cases
    found = durations(cases, {first: 100 * estimated_seconds(cases[first]), "of another run": 7.0})
    assert found[first] == 100 * estimated_seconds(cases[first])
    assert found[second] == pytest.approx(100 * estimated_seconds(cases[second]))
    alone = part_of(CASES, Shard(1, 2), {first: 1e3, **dict.fromkeys([second, *others], 1.0)})
    assert [case.id for case in alone.cases] == [first]


@pytest.mark.parametrize("text", ["", "2", "0/4", "5/4", "1/0", "-1/4", "a/b", "1/4/2", " 1/4", "1.0/4", "١/4"])
def test_what_is_no_shard(text):
    with pytest.raises(ShardError, match=r"--shard is '.*'; "):
        Shard.parse(text)


def test_what_cannot_be_divided():
    with pytest.raises(ShardError, match="--shard is '1/13', but 12 cases are selected, and no shard is empty"):
        part_of(CASES, Shard(1, 13))
    with pytest.raises(ShardError, match="--durations knows 1 cases, and none of the 12 that are selected"):
        part_of(CASES, Shard(1, 2), {"other": 1.0})


def listed(*words):
    return CliRunner().invoke(app, ["list", *map(str, words)])


@pytest.fixture
def matrix(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(FILE)
    return path


def test_list_prints_a_shard(matrix, tmp_path):
    shards = [listed(matrix, "--shard", f"{n}/2").stdout.split() for n in (1, 2)]
    assert sorted(shards[0] + shards[1]) == sorted(ALL)
    slow = journal(tmp_path, dict.fromkeys(ALL, 1.0) | {ALL[3]: 9.0})
    assert listed(matrix, "--shard", "1/2", "--durations", slow).stdout.split() == [ALL[3]]


def pytest_run(pytester, *words):
    pytester.makefile(".toml", small=FILE)
    return pytester.runpytest_inprocess("small.toml", "-p", PLUGIN, "-p", "no:xdist", "--ng-backend",
                                        "reference", *words)  # fmt: skip


def test_pytest_leaves_a_shard(pytester):
    """Of what -k leaves; the remaining cases are deselected, and tests that are no cases stay."""
    pytester.makepyfile("def test_of_something_else(): pass")
    result = pytest_run(
        pytester, "test_pytest_leaves_a_shard.py", "--co", "-q", "--ng-shard", "1/2", "-k", "48 or else"
    )
    expected = part_of(select(load_all([pytester.path / "small.toml"]), keyword="48"), Shard(1, 2)).cases
    for case in expected:
        result.stdout.fnmatch_lines([f"*{case.id}"])
    result.stdout.fnmatch_lines(["*test_of_something_else", f"{len(expected) + 1}/7 tests collected*"])


@pytest.mark.long
@pytest.mark.usefixtures("compiler")
def test_the_journal_of_pytest_says_which_shard_it_is_of(pytester, monkeypatch):
    monkeypatch.setattr("narrowgauge.harness.pytest_plugin.session.in_process", lambda config: True)
    pytest_run(pytester, "--ng-shard", "2/3", "--ng-report-dir", "out").assert_outcomes(passed=2, deselected=4)
    header = json.loads((pytester.path / "out" / "records.jsonl").read_text().splitlines()[0])
    part = part_of(load_all([pytester.path / "small.toml"]), Shard(2, 3))
    assert (header["shard"], header["selection"]) == ("2/3", digest(ALL))
    assert sorted(header["cases"]) == sorted(case.id for case in part.cases)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ng-shard", "4/3"], "--ng-shard is '4/3'; of 3 shards there are 1/3 to 3/3"),
        (["--ng-shard", "1/7"], "--ng-shard is '1/7', but 6 cases are selected, and no shard is empty"),
        (["--ng-durations", "x"], "--ng-durations divides cases into shards, and no --ng-shard is given"),
        (["--ng-shard", "1/2", "--ng-durations", "x"], "there is no x"),
    ],
)
def test_pytest_refuses(pytester, words, message):
    result = pytest_run(pytester, *words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str() + result.stdout.str()
