"""An operation of a user has the standing of the package's own: a single file, and every command works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

import narrowgauge
from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.operations import OPERATIONS, VARIABLE, OperationError, case_from_id, use_operations
from narrowgauge.harness.cli import app
from narrowgauge.harness.running.runner import run_case
from tests.paths import PLUGIN, ROOT

EXAMPLE = ROOT / "examples" / "my_operations"
CASES = ("scale_columns.toml", "--operations", "scale_columns.py")
CASE = "scale-columns/3x7/bf16/normal"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a user: the operation, its cases and its backends."""
    for path in EXAMPLE.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv(VARIABLE, "")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("narrowgauge_operations", "my_scale"))]:
        del sys.modules[name]


def command(*arguments: str, status: int = 0) -> str:
    """Output of a command, which has to end with a status."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == status, done.output
    return done.output


def records(report: str) -> list[dict[str, object]]:
    """Records of a run."""
    lines = (Path(report) / "records.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if "case" in entry]


def run(backend: str, report: str, *more: str, status: int = 0) -> str:
    """Output of a run."""
    given = ("--backend", f"my_scale:{backend}", "--report-dir", report, "--no-history", "-n", "1", *more)
    return command("run", *CASES, *given, status=status)


def test_an_operation_is_one_file(folder: Path) -> None:
    defining = [path.name for path in folder.glob("*.py") if "\nOPERATION" in path.read_text(encoding="utf-8")]
    assert defining == ["scale_columns.py"]


def test_every_command_works_on_it() -> None:
    listed = command("list", *CASES)
    assert f"{CASE}\n" in listed
    assert "32 cases" in listed

    assert "32 cases passed" in run("Backend", "right")
    gate = ("--run", "right", "--baseline", "baseline.json")
    command("baseline", "accept", *gate)
    assert "gate holds" in command("gate", *gate, *CASES[1:])
    journal = Path("right") / "records.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines()
    journal.write_text("\n".join(lines[:11]) + "\n", encoding="utf-8")
    assert "32 cases passed" in run("Backend", "right", "--resume")
    assert len(records("right")) == 32
    with Path("scale_columns.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert "sources: operations has changed" in command("gate", *gate, *CASES[1:], status=2)

    # An unknown mistake is shrunk and saved, and the saved case is run again.
    assert "--operations scale_columns.py" in run("LastColumn", "last", status=1)
    (record,) = [entry for entry in records("last") if entry["case"] == CASE]
    assert (record["verdict"], record["stage"], record["shrunk"]) == ("fail", "y", "1x1")
    show = ("show", CASE, "--backend", "my_scale:LastColumn", *CASES[1:])
    shown = command(*show, "--saved", str(record["saved"]), status=1)
    assert "scale-columns/1x1/bf16/normal" in shown
    assert "1 of 1 elements of y differ" in shown
    assert "row 2" in command(*show, "--at", "2,6", status=1)

    printed = command("mutants", *CASES, "--report-dir", "mutants")
    assert "caught by narrowgauge 2 of 2" in printed
    assert "cause named 2" in printed


def test_a_function_of_it_is_checked() -> None:
    use_operations(["scale_columns.py"])
    from my_scale import Backend as Right
    from my_scale import PlusOne

    assert narrowgauge.check(Right().scale_columns, CASE).passed == 1
    with pytest.raises(AssertionError, match="explained exactly by the factor is"):
        narrowgauge.check(PlusOne().scale_columns, [CASE, "scale-columns/5x9/fp32/outliers/plus_one"])
    with pytest.raises(ValueError, match="which does not run scale-columns"):
        narrowgauge.check(Right().scale_columns, CASE, operation="gemm")


@pytest.mark.long
def test_pytest_collects_its_cases(folder: Path) -> None:
    (folder / "pytest.ini").write_text(
        "[pytest]\nnarrowgauge_cases = scale_columns.toml\nnarrowgauge_operations = scale_columns.py\n"
        "narrowgauge_backend = my_scale:Backend\nnarrowgauge_keyword = 3x7 and fp32\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider"],
        capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
    )  # fmt: skip
    assert "8 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("empty.py", "", ["empty.py", "holds no operation", "OPERATION"]),
        ("gone.py", None, ["gone.py", "no such file"]),
        ("broken.py", "import torch_of_nobody\nOPERATION = 1\n", ["broken.py", "ModuleNotFoundError"]),
        (
            "other_name.py",
            "from scale_columns import OPERATION\nOPERATION = OPERATION\n",
            ["other_name.py", "'other-name'"],
        ),
        ("gemm.py", "OPERATION = 1\n", ["gemm.py", "there is an operation gemm already"]),
    ],
)
def test_a_wrong_file_is_one_error(folder: Path, name: str, text: str | None, words: Sequence[str]) -> None:
    if text is not None:
        (folder / name).write_text(text, encoding="utf-8")
    printed = command("list", "scale_columns.toml", "--operations", name, status=2)
    assert len(printed.splitlines()) == 1
    assert all(word in printed for word in words), printed


@pytest.mark.parametrize(
    ("number", "old", "new", "words"),
    [
        (1, "kinds: ClassVar[tuple[Kind, ...]] = (Kind.ROTATED,)", "", ["no input family", "kinds", "own_families"]),
        (2, "plus_one: bool = False", "plus_one: complex = 0j", ["plus_one", "complex", "Literal"]),
        (3, "    reference=scale_columns,\n", "", ["no judge", "`reference`"]),
        (4, '{"y": Result(("M", "K"))}', '{"z": Result(("M", "K"))}', ["the reference gave y", "results names z"]),
        (5, '{"y": Result(("M", "K"))}', '{"y": Result(("K", "M"))}', ["scale_columns_5 gave", "(3, 7)", "(7, 3)"]),
    ],
)
def test_a_wrong_object_says_what_is_wrong(folder: Path, number: int, old: str, new: str, words: Sequence[str]) -> None:
    text = (folder / "scale_columns.py").read_text(encoding="utf-8")
    assert old in text
    name = f"scale-columns-{number}"  # a process has one object of a name
    changed = text.replace(old, new).replace('"scale-columns"', f'"{name}"')
    (folder / f"scale_columns_{number}.py").write_text(changed, encoding="utf-8")
    message = message_of(name)
    assert all(word in message for word in words), message


def message_of(name: str) -> str:
    """The error of the file of an operation, or the message of a case on the right backend."""
    file = name.replace("-", "_")
    try:
        use_operations([f"{file}.py"])
    except OperationError as error:
        return str(error)
    case = case_from_id(CASE.replace("scale-columns", name))
    assert case is not None
    from my_scale import Backend as Right

    right = Right()
    setattr(right, file, right.scale_columns)
    return run_case(case, Backend.local("right", right)).message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("heads: int = 1", "heads = [2, 4]"),
        ('before: Literal["none", "relu"] = "none"\n    after: Literal["none", "relu"] = "none"', 'after = "relu"'),
        ('mode: Literal["plain", "a+b"] = "plain"', 'mode = "a+b"'),
        ("eps: float = 1e-6", "eps = [7, 0.5]"),
    ],
)
def test_the_id_tells_every_value_of_a_key(folder: Path, key: str, value: str) -> None:
    """Cases that differ in a key are different cases, or the file is refused."""
    text = (folder / "scale_columns.py").read_text(encoding="utf-8")
    text = text.replace("from typing import ", "from typing import Literal, ")
    (folder / "scale_columns.py").write_text(
        text.replace("    plus_one: bool = False\n", f"    {key}\n"), encoding="utf-8"
    )
    table = (
        '[[matrix]]\noperation = "scale-columns"\ntier = "quick"\nshape = [3, 7]\ndtype = "bf16"\ninputs = "normal"\n'
    )
    (folder / "keys.toml").write_text(f"{table}{value}\n", encoding="utf-8")
    found = CliRunner().invoke(app, ["list", "keys.toml", *CASES[1:]])
    if found.exit_code:
        assert "is also that of another case" in found.output
    else:
        ids = found.output.splitlines()[:-1]
        assert len(ids) == len(set(ids)) == 2, found.output
        assert all(case_from_id(name) is not None for name in ids)


def test_a_broken_operation_leaves_the_others_alone(folder: Path) -> None:
    assert "swizzle" in OPERATIONS
    assert "scale-columns" not in OPERATIONS
    use_operations([folder / "scale_columns.py"])
    assert {"swizzle", "scale-columns"} <= set(OPERATIONS)
