"""Every command and code block of README.md and docs/*.md runs, page by page, on a CPU, in an empty folder.

The files of the package are those of the wheel (tests/test_install.py). A page with a further need has a comment:
`CHECKOUT`. `FEW` reduces the cases of each command; the quick tier runs all cases. `only_parsed` names the commands
without a run
here, with the reason: the real command-line parser reads these commands, and their selection of cases is not empty.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from narrowgauge.harness.cases.operations import VARIABLE
from narrowgauge.harness.cli import app
from narrowgauge.spec.recipes import VARIABLE as RULES_VARIABLE
from tests.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FEW = "(/normal or outliers or lattice) and not (columnwise or both)"
FILE = re.compile(r"# ([\w.]+\.(?:py|toml))\n")
"""First line of a block that is a file of the current folder."""
SHOWN = ("README.md", "contracts.md")
"""Pages whose text blocks are all outputs of their own blocks."""
FAILS = "TiesAway"
"""Backend of the commands with exit status 1."""
MINUTES = {"bench": "measures for minutes", "mutants": "runs for an hour", "train": "trains for minutes",
           "soak": "runs many seeds"}  # fmt: skip
CHECKOUT = "in a checkout"
"""Words in the first paragraph of a page whose commands need files of a checkout of narrowgauge."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of every block with a language."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def shown_outputs(page: Path) -> Iterator[str]:
    """The text blocks of a page that show what its commands and code print: those directly behind a block that runs,
    and all of the pages in `SHOWN`."""
    source = page.read_text(encoding="utf-8")
    end, before = -1, ""
    for found in BLOCK.finditer(source):
        behind = before in ("sh", "python") and not source[end : found.start()].strip()
        if found[1] == "text" and (behind or page.name in SHOWN or found[2].startswith("speaks ")):
            yield found[2]
        end, before = found.end(), found[1]


def commands(text: str) -> list[str]:
    """The commands of a block, without comments."""
    return [line.partition("  #")[0].strip() for line in text.splitlines() if line.strip()]


def first_pages() -> dict[str, str]:
    """The first page of each command; other pages with the same command only parse it."""
    pages: dict[str, str] = {}
    for page in PAGES:
        for command in (command for language, text in blocks(page) if language == "sh" for command in commands(text)):
            pages.setdefault(command, page.name)
    return pages


def only_parsed(program: str, arguments: list[str]) -> str:
    """The reason for not running a command here, empty if it runs."""
    if program in ("make", "pip"):
        return "sets up an environment"
    if program == "pytest":
        return "tests/harness/pytest_plugin runs pytest on case files"
    command = arguments[0]
    if command in MINUTES:
        return MINUTES[command]
    if "cuda" in arguments or command == "sanitize":
        return "needs a GPU"
    if "--sanitize" in arguments or "--schedules" in arguments:
        return "builds and runs kernels for minutes"
    if any(word.startswith("reports/baselines/") for word in arguments):
        return "compares the whole quick tier: make gate"
    return ""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a page, empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv(RULES_VARIABLE, "")
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page: Path, folder: Path, pytestconfig: pytest.Config) -> None:
    if CHECKOUT in " ".join(page.read_text(encoding="utf-8").split("\n\n")[1].split()):
        (folder / "examples").symlink_to(ROOT / "examples")
    printed = []
    first = first_pages()
    for language, text in blocks(page):
        if (named := FILE.match(text)) is not None:
            Path(named[1]).write_text(text, encoding="utf-8")
        if language == "sh":
            for command in commands(text):
                parse(command, pytestconfig)
                program, *arguments = shlex.split(command.partition(" || ")[0])
                if first[command] != page.name or only_parsed(program, arguments):
                    check_selection(program, arguments)
                else:
                    printed.append(run_command(command))
        elif language == "yaml":
            for command in re.findall(r"- run: (.*)", text):
                parse(command, pytestconfig)
        elif language == "python":
            printed.append(run_python(text))
        elif language == "toml":
            assert named is not None, f"{page.name}: a block of TOML begins with the name of its file"
        elif language == "json":
            json.loads("{" + text.strip().rstrip(",") + "}")
        else:
            assert language in ("text", "{toctree}", "{eval-rst}"), f"{page.name}: nothing checks a block of {language}"
    output = "\n".join(printed)
    for text in shown_outputs(page):
        assert text in output, f"{page.name} shows other output than the commands print:\n{output}"


def run_python(text: str) -> str:
    """Run a block; its output."""
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            exec(compile(text, "block", "exec"), {"__name__": "block"})
        return output.getvalue()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def run_command(line: str) -> str:
    """Run a command of narrowgauge, on few cases; its output."""
    command, _, otherwise = line.partition(" || ")
    _, *arguments = shlex.split(command)
    if "-k" in arguments and arguments[0] != "list":
        place = arguments.index("-k") + 1
        arguments[place] = f"({arguments[place]}) and {FEW}"
    if arguments[0] == "run":
        arguments += ["-n", "1"]
    status, output = run_narrowgauge(arguments)
    expected = {1} if FAILS in command else {0, 1} if otherwise else {0}
    assert status in expected, f"{line}: exit status {status}\n{output}"
    return output


def run_narrowgauge(arguments: list[str]) -> tuple[int, str]:
    """In this process, which has imported torch."""
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output + (repr(done.exception) if done.exception else "")


def parse(command: str, config: pytest.Config) -> None:
    """Read a command with the parser of its program; fails for an unknown option or argument."""
    program, *arguments = shlex.split(command.partition(" || ")[0])
    if program == "make":
        done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    elif program == "pip":
        parse_pip(arguments)
    elif program == "pytest":
        _, unknown = config._parser.parse_known_and_unknown_args(arguments)
        assert not unknown, f"{command}: unknown {unknown}"
    else:
        assert program == "narrowgauge", command
        parse_narrowgauge(arguments)


def parse_narrowgauge(arguments: list[str]) -> None:
    parser: Any = typer.main.get_command(app)
    context, rest = None, list(arguments)
    name = "narrowgauge"
    while True:
        try:
            context = parser.make_context(name, list(rest), parent=context)
        except typer.Exit:  # --version ends the command
            return
        if not hasattr(parser, "resolve_command"):
            break
        name, parser, rest = parser.resolve_command(context, rest)


def check_selection(program: str, arguments: list[str]) -> None:
    """Fails if a parsed command selects no case."""
    if program == "narrowgauge" and arguments[0] in ("run", "sanitize", "soak"):
        selection = [word for word in arguments if re.fullmatch(r"cases/[\w.]+", word)]
        if "-k" in arguments:
            selection += arguments[arguments.index("-k") :][:2]
        status, output = listed(tuple(selection))
        assert status == 0, output


@cache
def listed(selection: tuple[str, ...]) -> tuple[int, str]:
    return run_narrowgauge(["list", *selection])


def parse_pip(arguments: list[str]) -> None:
    """No network here: the extras and the constraints file exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r"\[([\w,]+)\]", " ".join(arguments))) <= set(extras)
    assert all((ROOT / arguments[place + 1]).is_file() for place, word in enumerate(arguments) if word == "-c")
    assert arguments[0] in ("install", "wheel")


def test_a_wrong_option_is_found(pytestconfig: pytest.Config) -> None:
    for command in ("narrowgauge run --devise cpu", "narrowgauge baseline acept --baseline x", "pytest cases --lff"):
        with pytest.raises((AssertionError, Exception)) as raised:
            parse(command, pytestconfig)
        assert "devise" in str(raised.value) or "acept" in str(raised.value) or "lff" in str(raised.value)


@pytest.mark.long
def test_the_counts_of_the_readme(folder: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    module, arguments = "narrowgauge.examples.my_kernels", ["run", "-n", "1", "-k"]
    correct, wrong = f"{module}:Backend", f"{module}:{FAILS}"
    keyword = shlex.split(next(line for line in readme.splitlines() if line.startswith("narrowgauge run")))[-1]
    assert "34 cases passed" in run_narrowgauge([*arguments, keyword, "--backend", correct])[1]
    assert "8 of 34 cases did not pass" in run_narrowgauge([*arguments, keyword, "--backend", wrong])[1]
    assert "passes all 34 cases" in readme
    assert "second passes 26 and" in readme
