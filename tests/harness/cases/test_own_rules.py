"""A rule of a user from the case file to the gate: every command judges by it, and its digest is held."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import narrowgauge
from narrowgauge.harness.cases.case_file import CaseFileError, load
from narrowgauge.harness.cli import app
from narrowgauge.harness.hosts.codec import decode_argument, encode_argument, no_tensor
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.spec.recipes import VARIABLE, find_recipe, use_rules
from tests.paths import PLUGIN, ROOT

RULE = '["nvfp4@own"]\nrounding = "nearest-away"\n'
CASES = """
rules = "own.toml"

[[matrix]]
operation = "quantize"
tier = "quick"
recipe = "nvfp4@own"
shape = [[16, 32], [1, 16]]
dtype = "bf16"
inputs = "e2m1-ties"
"""
KERNEL = """
import dataclasses
import narrowgauge
from narrowgauge.reference import ops

OWN = dataclasses.replace(narrowgauge.recipe("nvfp4"), dialect="mine", rounding="nearest-away")


class Backend:
    def quantize(self, x, recipe, **options):
        q = ops.quantize(x, OWN, **options)
        return q.codes, q.scales, q.amax
"""
CASE = "quantize/nvfp4@own/16x32/bf16/e2m1-ties"
BACKEND = "kernels/own.py:Backend"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a user: a kernel, its rule and a case file that names the rule."""
    (tmp_path / "kernels").mkdir()
    for name, text in (("own.toml", RULE), ("cases.toml", CASES), ("kernels/own.py", KERNEL)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv(VARIABLE, "")
    yield tmp_path
    use_rules([])


def command(*arguments: str, status: int = 0) -> str:
    """Output of a command, which has to end with a status. Rules of earlier commands are not known to it."""
    os.environ[VARIABLE] = ""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == status, done.output
    return done.output


def run(*more: str, status: int = 0) -> str:
    """Output of a run of the case file."""
    return command("run", "cases.toml", "--backend", BACKEND, "--no-history", "-n", "1", *more, status=status)


def changed_rule() -> None:
    """Another rule of the same name."""
    Path("own.toml").write_text(RULE.replace("away", "toward-zero"), encoding="utf-8")


def test_a_rule_is_held_from_the_run_to_the_gate() -> None:
    assert "2 cases passed" in run()
    gate = ("--baseline", "host.json")
    command("baseline", "accept", *gate)
    assert '"rules": {"nvfp4@own": "' in Path("host.json").read_text(encoding="utf-8")
    assert "gate holds" in command("gate", *gate)
    header = json.loads(Path("reports/latest/records.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert header["environment"]["rules"] == "nvfp4@own (own.toml)"

    # A comment changes nothing; a choice changes what the run says.
    Path("own.toml").write_text(f"# ours\n{RULE}", encoding="utf-8")
    assert "gate holds" in command("gate", *gate)
    changed_rule()
    assert "sources: rule nvfp4@own has changed since the run" in command("gate", *gate, status=2)
    assert "the source of rule nvfp4@own has changed" in run("--resume", status=2)

    # A kernel that follows the changed rule is held to the accepted one.
    Path("kernels/own.py").write_text(KERNEL.replace("away", "toward-zero"), encoding="utf-8")
    assert "2 cases passed" in run()
    printed = command("gate", *gate, status=1)
    assert "another rule" in printed
    assert "nvfp4@own is" in printed
    assert "accept the run anew" in printed
    assert "another rule" in command("baseline", "accept", *gate)
    assert "gate holds" in command("gate", *gate)
    Path("own.toml").rename("moved.toml")
    assert "the file own.toml is not there" in command("gate", *gate)


def test_a_failure_names_the_file_of_its_rule() -> None:
    changed_rule()
    printed = run(status=1)
    assert "--rules own.toml" in printed
    lines = Path("reports/latest/records.jsonl").read_text(encoding="utf-8").splitlines()
    record = next(entry for entry in map(json.loads, lines) if entry.get("case") == CASE)
    shown = command("show", CASE, "--backend", BACKEND, "--rules", "own.toml", status=1)
    assert "ties round away from zero" in shown
    assert "no dialect 'own'" not in shown
    Path("own.toml").write_text(RULE, encoding="utf-8")
    assert "codes" in command("show", CASE, "--backend", BACKEND, "--rules", "own.toml", "--saved", record["saved"])


@pytest.mark.long
def test_shards_and_pytest_know_the_rule(folder: Path) -> None:
    for shard in ("1/2", "2/2"):
        run("--shard", shard, "--report-dir", f"shards/{shard[0]}")
    assert "2 cases" in command("merge", "shards/1", "shards/2", "--report-dir", "whole")

    Path("other.toml").write_text(CASES.replace('rules = "own.toml"\n', ""), encoding="utf-8")
    settings = f"[pytest]\nnarrowgauge_cases = other.toml\nnarrowgauge_backend = {BACKEND}\n"
    for rules, status in (("narrowgauge_rules = own.toml\n", 0), ("", 2)):
        Path("pytest.ini").write_text(settings + rules, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider"], cwd=folder / "kernels",
            capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT), VARIABLE: ""},
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        assert ("2 passed" if rules else "--rules FILE adds yours") in done.stdout + done.stderr


def test_a_host_gets_the_choices_of_the_judge() -> None:
    rule = find_recipe("own.toml")
    message = encode_argument(rule, no_tensor)
    changed_rule()
    use_rules([])
    assert decode_argument(message, no_tensor) == rule


def test_inputs_are_those_of_the_rule() -> None:
    case = load("cases.toml")[0]
    x = narrowgauge.inputs("own.toml", (16, 32), "e2m1-ties")
    assert case.id == CASE
    assert x.equal(make_inputs(case).x)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"own.toml"', '"gone.toml"', ["rules", "gone.toml", "--save"]),
        ('"own.toml"', "3", ["rules is 3", "own.toml"]),
        ('"own.toml"', "[]", ["nvfp4@own", "--rules FILE"]),
        ('"nvfp4@own"', '"own.toml"', ["recipe is 'own.toml', a file", "`rules`"]),
        ("rules", "rulse", ["unknown key 'rulse'", "'rules'"]),
    ],
)
def test_a_wrong_key_is_one_error(before: str, after: str, words: list[str]) -> None:
    Path("wrong.toml").write_text(CASES.replace(before, after), encoding="utf-8")
    with pytest.raises(CaseFileError) as caught:
        load("wrong.toml")
    for word in ("wrong.toml", *words):
        assert word in str(caught.value)
