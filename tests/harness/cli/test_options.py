"""The commands and their options: groups of `--help`, old names of options, and a page for every option."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import narrowgauge
from narrowgauge.harness.cli import app
from narrowgauge.harness.cli.old_names import OLD_NAMES, POSITION, with_present_names
from tests.paths import ROOT

GROUP: Any = typer.main.get_command(app)
PAGES = [ROOT / "README.md", ROOT / "cases" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RENAMED = [(command, *names) for command, table in OLD_NAMES.items() for names in table.items()]


def options(group: Any = GROUP, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command, for example `baseline accept`, with all its options."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from options(command, f"{prefix}{name} ")
        else:
            yield from ((prefix + name, each) for each in command.params if each.param_type_name == "option")


def parsed(command: str, *words: str) -> dict[str, Any]:
    """Parameters of a command line."""
    found: dict[str, Any] = GROUP.commands[command].make_context(command, list(words)).params
    return found


def required(command: str, *given: str) -> list[str]:
    """Further words needed by a command line."""
    words = {
        "parity": ["reference", "native"],
        "dialect": ["reference"],
        "order": ["reference"],
        "show": ["an/id"],
        "contract": ["own.py"],
        "check": ["k.py:f"],
        "power": ["t.py::f"],
    }
    words = words.get(command, [])
    if "--backend" in given:
        words = []
    missing = {"--hardware": "hopper-fp8", "--shape": "8x64x8"} if command == "predict" else {}
    present = {OLD_NAMES.get(command, {}).get(word, word) for word in given}
    return words + [word for name, value in missing.items() if name not in present for word in (name, value)]


def test_the_commands_stand_in_groups_each_on_a_whole_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["--help"]).stdout
    titles = re.findall(r"(?m)^(\w.*):$", shown)
    assert titles == ["Options", "Run and read", "Judge one thing", "Keep", "Develop narrowgauge"]
    lines = re.findall(r"(?m)^  ([a-z]+) +(\S.*)$", shown.partition("Run and read:")[2])
    assert sorted(name for name, _ in lines) == sorted(GROUP.commands)
    assert all(text.endswith(".") and not text.endswith("..") for _, text in lines)
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(("command", "old", "present"), RENAMED, ids=[" ".join(row[:2]) for row in RENAMED])
def test_an_old_name_means_the_present_one(command: str, old: str, present: str) -> None:
    flag = present in (each.opts[0] for name, each in options() if name == command and each.is_flag)
    value = [] if "=" in present or flag else ["3"]  # text, a path and a number
    expected = value if present == POSITION else [present, *value]
    by_present = parsed(command, *required(command, old), *expected)
    assert parsed(command, old, *value, *required(command, old)) == by_present
    assert by_present != parsed(command, *required(command))
    if value:
        assert parsed(command, f"{old}={value[0]}", *required(command, old)) == by_present
    assert not [each for name, each in options() if name == command and old in each.opts]


def test_several_values_are_given_again_or_with_commas() -> None:
    several = [(command, each.opts[0]) for command, each in options() if "or with commas" in (each.help or "")]
    assert {name for _, name in several} == {"--recipe", "--shape", "--family", "--out-dtype"}
    for command, name in several:
        again = parsed(command, *required(command), name, "3", name, "4")
        assert parsed(command, *required(command), name, "3,4") == again
        assert ["3", "4"] in again.values()


def test_words_behind_a_double_dash_are_no_options() -> None:
    assert with_present_names("run", ["--cases", "a", "-k", "b", "--", "--cases"]) == ["-k", "b", "--", "--cases", "a"]
    assert with_present_names("run", ["--cases"]) == ["--cases"]
    assert with_present_names("gate", ["--out", "a"]) == ["--out", "a"]
    refused = CliRunner().invoke(app, ["run", "--cases"])
    assert refused.exit_code == 2
    assert "--cases" in refused.output


def test_every_option_is_on_a_page_that_names_its_command() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    lost = []
    for command, option in options():
        about = [text for text in texts if re.search(rf"`{command}\b|narrowgauge {command}\b", text)]
        for name in option.opts:
            word = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
            if name != "--help" and not any(word.search(text) for text in about):
                lost.append(f"{command} {name}")
    assert not lost, "\n".join(lost)


def test_the_page_of_stable_names_has_the_names() -> None:
    """Python names, commands, and the old names of options."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = page.partition("lists:\n\n```text\n")[2].partition("```")[0].split()
    assert names == narrowgauge.__all__
    section = page.partition("\n## Command line\n")[2].partition("\n## ")[0]
    groups, renamed = section.split("| name | meaning | old names |")
    found = re.findall(r"(?m)^\| ([a-z ]+) \| (`.*) \|$", groups)
    shown = {title: re.findall("`([a-z ]+)`", row) for title, row in found}
    expected: dict[str, list[str]] = {}
    for name, command in GROUP.commands.items():
        inner = getattr(command, "commands", None)
        names = [f"{name} {each}" for each in inner] if inner else [name]
        expected.setdefault(command.rich_help_panel.lower(), []).extend(names)
    assert shown == expected
    rows = [line.split("|")[1:4] for line in renamed.splitlines() if line.startswith("| `")]
    for command, old, present in RENAMED:
        word = {"--cases": "CASES", "--backend": "BACKEND"}[old] if present == POSITION else present.split("=")[0]
        (row,) = [row for row in rows if f"`{word}`" in row[0]]
        assert f"`{old}`" in row[0] + row[2], (command, old)


def test_no_page_and_no_script_has_an_old_name() -> None:
    places = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "Makefile", ROOT / "action.yml", *(ROOT / "examples").glob("*.*")]
    texts = {place.name: place.read_text(encoding="utf-8") for place in places if place.is_file()}
    lines = [(name, line) for name, text in texts.items() for line in text.replace("\\\n", " ").splitlines()]
    found = [
        f"{name}: {line}"
        for name, line in lines
        for command, words in re.findall(r"narrowgauge ([a-z]+) ([^`|]*)", line)
        if set(OLD_NAMES.get(command, ())) & set(words.split())
    ]
    assert not found
