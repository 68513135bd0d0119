"""docs/add.md: every addition of the page works in a copy of the checkout, changed by the blocks of the page.

`python -m tests.test_add` in the copy runs the commands and the Python blocks of the page, and prints the results.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.paths import ROOT

PAGE = ROOT / "docs" / "add.md"
CODE = ("harness", "reference", "native", "narrowgauge")
"""Folders of code. The remaining files of the page are data, and backends of a user."""
COPIED = (*CODE, "cases", "examples", "docs", "conftest.py", "pyproject.toml")
OWN, PACKAGE, RECIPE, DIALECT, FAMILY, CAUSE, LAYOUT, ADAPTER = (
    "An operation of your own repository", "An operation of this package", "A recipe", "A dialect", "An input family",
    "A cause", "A layout of scales", "An adapter of a library",
)  # fmt: skip
COUNTS = {OWN: [1], PACKAGE: [2, 4], RECIPE: [1], DIALECT: [1], FAMILY: [2], CAUSE: [2], LAYOUT: [1], ADAPTER: [1]}
"""Code files of the additions; two numbers: without and with a native kernel. Fewer files are better."""
EXPECTED = {
    "Task": ["32 cases passed"],
    OWN: [
        "scale-columns/64x256/fp32/zeros/plus_one", "y wrong, explained exactly by the factor is 1 + gamma",
        "0x3CD4       0.02587890625  0x3CD4", "0 failures", "caught by narrowgauge 2 of 2", "32 passed",
    ],
    PACKAGE: ["8 cases passed", "8 cases passed", "amax wrong, explained exactly by the largest number, not"],
    RECIPE: ["2 cases passed"],
    DIALECT: [],
    FAMILY: ["2 cases passed"],
    CAUSE: ["explained exactly by: elements: signs are inverted", "2 known failures"],
    LAYOUT: [],
    ADAPTER: ["1 case passed"],
}  # fmt: skip
"""By section: text in the output of every command, in order."""
PROGRAMS = {OWN: 1, DIALECT: 1, LAYOUT: 1}
"""Number of Python blocks by section."""
LIBRARY = """
import narrowgauge

def quantize(x):
    q = narrowgauge.quantize(x, "nvfp4@my-library")
    return q.codes, q.scales, q.amax
"""
"""The library of the adapter, `my_library`."""


class Block(NamedTuple):
    """A block of the page."""

    section: str
    language: str
    text: str

    @property
    def new_file(self) -> str:
        """Path in the comment of the first line, or empty."""
        match = re.match(r"(?:#|//) ([\w/]+\.\w+)\n", self.text)
        return match[1] if match else ""

    @property
    def changed_file(self) -> str:
        """Path behind `---` in the first line, or empty."""
        match = re.match(r"--- (\S+)\n", self.text)
        return match[1] if match else ""

    @property
    def commands(self) -> list[str]:
        """The lines of a block of commands, else none."""
        return self.text.splitlines() if self.text.startswith(("narrowgauge ", "pytest ")) else []

    @property
    def is_program(self) -> bool:
        return self.language == "python" or self.text.startswith("import ")


def sections(page: Path) -> dict[str, str]:
    """Text of the sections by their headings. The text before the first heading is the section Task."""
    first, *parts = page.read_text(encoding="utf-8").split("\n## ")
    return {"Task": first, **{part.partition("\n")[0]: part for part in parts}}


def blocks(page: Path) -> list[Block]:
    """All blocks, in order."""
    pattern = re.compile(r"^```(\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [Block(name, *found) for name, text in sections(page).items() for found in pattern.findall(text)]


def changed(text: str, block: str) -> str:
    """A text with the changes of a block: hunks of lines with a space, `-` or `+` in front, between lines `@@`."""
    for hunk in block.partition("\n")[2].removesuffix("\n").split("\n@@\n"):
        lines = hunk.split("\n")
        assert all(line[:1] in ("", " ", "-", "+") for line in lines), hunk
        before, after = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != sign) for sign in "+-")
        assert before != after
        assert f"\n{text}".count(f"\n{before}") == 1, f"the changed text must be in the file once:\n{before}"
        text = f"\n{text}".replace(f"\n{before}", f"\n{after}")[1:]
    return text


def code_files(added: list[Block]) -> dict[str, set[str]]:
    """Code files of the blocks, by section."""
    files: dict[str, set[str]] = {}
    for block in added:
        name = block.new_file or block.changed_file
        if name.startswith(CODE):
            files.setdefault(block.section, set()).add(name)
    return files


def apply(folder: Path, added: list[Block]) -> None:
    """Make the additions in a copy of the checkout."""
    for block in added:
        if block.new_file:
            path = folder / block.new_file
            assert not path.exists(), f"{block.new_file} is no new file"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text.partition("\n")[2], encoding="utf-8")
        elif block.changed_file:
            path = folder / block.changed_file
            path.write_text(changed(path.read_text(encoding="utf-8"), block.text), encoding="utf-8")


def copy_checkout(folder: Path) -> None:
    """A copy of the checkout without its tests, with this module. Links stay links."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True)
        else:
            shutil.copy2(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    for name in ("__init__.py", "paths.py", Path(__file__).name):
        shutil.copy2(ROOT / "tests" / name, folder / "tests" / name)
    (folder / "my_library.py").write_text(LIBRARY, encoding="utf-8")


# ---- tests -----------------------------------------------------------------------------------------------------------


def test_the_page_has_the_example() -> None:
    file = (ROOT / "examples" / "my_operations" / "scale_columns.py").read_text(encoding="utf-8")
    assert file in [block.text for block in blocks(PAGE)]


@pytest.mark.parametrize("block", ["--- a\n-x = 1\n+x = 2\n", "--- a\n y = 1\n+z = 2\n", "--- a\n x\n-y = 2\n"])
def test_a_change_of_another_text_is_refused(block: str) -> None:
    assert changed("x = 0\ny = 2\n", "--- a\n-x = 0\n+x = 1\n@@\n y = 2\n+z = 3\n") == "x = 1\ny = 2\nz = 3\n"
    with pytest.raises(AssertionError, match="in the file once"):
        changed("x = 0\ny = 2\n", block)


def test_the_page_counts_the_files_of_each_addition() -> None:
    texts, files = sections(PAGE), code_files(blocks(PAGE))
    for section, counts in list(COUNTS.items())[1:]:
        rows = re.findall(r"^\| `(\S+)` \| (.*) \|$", texts[section], re.MULTILINE)
        named = [re.compile(re.sub(r"<\w+>", r"\\w+", re.escape(name))) for name, _ in rows]
        matches = [[file for file in files[section] if name.fullmatch(file)] for name in named]
        assert [len(match) for match in matches] == [1] * len(rows), section
        assert len(files[section]) == len(rows) == counts[-1], section
        assert sum(not content.startswith("with a kernel:") for _, content in rows) == counts[0], section
    table = re.findall(r"^\| \[.*\]\(#([\w-]+)\) \| (.*) \|$", texts["Task"], re.MULTILINE)
    assert {anchor: list(map(int, re.findall(r"\d+", count))) for anchor, count in table} == {
        section.lower().replace(" ", "-"): counts for section, counts in COUNTS.items()
    }


def test_every_addition_of_the_page_works(tmp_path: Path) -> None:
    copy_checkout(tmp_path)
    apply(tmp_path, blocks(PAGE))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "NARROWGAUGE_O"))}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.test_add"], cwd=tmp_path, env=environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["package"] == str(tmp_path / "narrowgauge" / "__init__.py")
    assert found["recipe"] == "nvfp4-max256"
    assert found["adapter"] == "narrowgauge.harness.backends.adapters.my_library"
    assert found["entry point"] == "my_columns"
    for section, expected in EXPECTED.items():
        commands = [entry for entry in found["commands"] if entry["section"] == section]
        for entry, text in zip(commands, expected, strict=True):
            fails = entry["command"].endswith("|| true")
            assert entry["status"] == fails, f"{entry['command']}\n{entry['output']}"
            assert text in entry["output"], f"{entry['command']}\n{entry['output']}"
    assert [entry for entry in found["programs"] if entry["error"]] == []
    assert Counter(entry["section"] for entry in found["programs"]) == PROGRAMS


# ---- the process in the copy -----------------------------------------------------------------------------------------


def main() -> None:
    """Run all commands and programs of the page; print the results as a line of JSON."""
    import narrowgauge
    from narrowgauge.harness.backends.loading import load_implementation
    from narrowgauge.harness.cases.operations import OPERATIONS, VARIABLE

    commands: list[dict[str, Any]] = []
    programs: list[dict[str, str]] = []
    for block in blocks(PAGE):
        for command in block.commands:
            status, output = run_command(command, len(commands))
            commands.append({"section": block.section, "command": command, "status": status, "output": output})
            os.environ.pop(VARIABLE, None)
        if block.is_program:
            programs.append({"section": block.section, "error": run_program(block.text)})
            os.environ.pop(VARIABLE, None)
    install_operation(ROOT / "installed")
    os.environ[VARIABLE] = os.pathsep  # another value: the operations are searched again
    found = {
        "package": narrowgauge.__file__,
        "recipe": next((str(recipe) for recipe in narrowgauge.recipes() if recipe.name == "nvfp4-max256"), ""),
        "adapter": type(load_implementation("my-library", "cpu")).__module__,
        "entry point": OPERATIONS["my-columns"].__module__,
        "commands": commands,
        "programs": programs,
    }
    print(json.dumps(found))


def install_operation(folder: Path) -> None:
    """Make a folder of `sys.path` with a package whose entry point is an operation."""
    info = folder / "my_package-1.dist-info"
    info.mkdir(parents=True)
    (info / "entry_points.txt").write_text("[narrowgauge.operations]\nmy-columns = my_columns\n", encoding="utf-8")
    example = (ROOT / "examples" / "my_operations" / "scale_columns.py").read_text(encoding="utf-8")
    (folder / "my_columns.py").write_text(example.replace("scale-columns", "my-columns"), encoding="utf-8")
    sys.path.append(str(folder))


def run_command(command: str, number: int) -> tuple[int, str]:
    """Exit status and output of a command. It runs in this process: torch is imported once for all commands."""
    from typer.testing import CliRunner

    from narrowgauge.harness.cli import app

    program, *arguments = shlex.split(command.removesuffix(" || true"))
    report = f"reports/{number}"
    if program == "pytest":
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            options = ["-q", "--assert=plain", "-p", "no:cacheprovider", "--ng-report-dir", report, "--ng-no-history"]
            status = int(pytest.main([*arguments, *options]))
        return status, output.getvalue()
    options = {
        "run": ["-n", "1", "--report-dir", report, "--no-history"], "mutants": ["-n", "1", "--report-dir", report],
        "soak": ["-n", "1"],
    }.get(arguments[0], [])  # fmt: skip
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments, *options])
    return done.exit_code, done.output + "".join(traceback.format_exception(done.exception) if done.exception else [])


def run_program(text: str) -> str:
    """The traceback of a block of Python, or empty."""
    try:
        with redirect_stdout(io.StringIO()):
            exec(compile(text, "block", "exec"), {"__name__": "block"})
    except Exception:
        return f"{text}\n{traceback.format_exc()}"
    return ""


if __name__ == "__main__":
    main()
