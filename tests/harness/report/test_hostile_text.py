"""Hostile text in every column of a record, through everything that writes or prints a record."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from rich.console import Console

from narrowgauge.harness.machine.plain_text import LONGEST
from narrowgauge.harness.pytest_plugin.junit import properties
from narrowgauge.harness.records.record import Record
from narrowgauge.harness.report import github, markdown, report, text
from narrowgauge.harness.report.failure_view import first_failure, reproduction
from tests.harness.pages import island
from tests.harness.runs import record

TEXT = [column.name for column in fields(Record) if column.type == "str"]
HOSTILE = [
    # terminals
    "\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "\x9b31m", "\x90q\x9c", "\x00",
    "a\x08\x08b", "passed\rFAILED", "\x7f", "\x0c", "\x0e", "\u202eliart", "\u2066x\u2069", "\u200fx", "\ufeffx",
    "\u2028::error::x", "\x85::error::x", "[red]x[/]", "[link=http://evil]x[/link]", "\ud800", "\udfff\ud800", "\uffff",
    # logs of CI jobs
    "::error::x", "::set-env name=PATH::/tmp", "::add-mask::a", "::stop-commands::x", "one\n::error file=a::x",
    "one\r\n::debug::x", "\t ::warning::x", "word " * 30 + "::error::x", "x" * 79 + " ::error::x", "##[error]x",
    "a ##[group]x", "##vso[task.setvariable variable=a]b", "###[endgroup]", "%0A::error::x", "a\n\n::group::b",
    # spreadsheets
    "=cmd|' /C calc'!A0", "=1+1", "+1+1", "-1+1", "@SUM(1)", "\t=1+1", "\r=1+1", "\n=1+1", "=HYPERLINK(\"http://e\")",
    "\uff1d1+1", "\uff0b1", "\uff0d1", "\uff20a", '"=1+1"', "'=1+1",
    # pages
    "<script>alert(1)</script>", "</script><script>alert(1)</script>", "<!--<script>", "]]>", "<img src=x onerror=y>",
    "<svg/onload=alert(1)>", '" onmouseover="alert(1)', "' onmouseover='alert(1)", "{{ 7 * 7 }}", "{% raw %}",
    "javascript:alert(1)", "&lt;script&gt;", "</title><script>x</script>", "</pre></code><script>x</script>",
    # Markdown
    "[a](javascript:alert(1))", "![a](http://evil)", "| a | b |", "`a``b```c", "# heading", "<details>",
    "\n\n# heading", "~~~", "    code", "<https://evil>",
    # XML
    "<![CDATA[x", "&entity;", "<!DOCTYPE x>",
    # size
    "x" * (LONGEST + 1000), "::\n" * 2000, "€" * LONGEST,
]  # fmt: skip
NAMES = ("case", "file", "recipe", "dtype", "inputs", "flags", "backend")
SENTENCES = ("message", "known", "stage", "baseline", "save_note", "shrunk", "saved")
UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\u200f\ufeff\ud800-\udfff\uffff]")
COMMAND = re.compile(r"^\s*::|##\w*\[", re.MULTILINE)


def hostile_record(value: str, number: int) -> dict[str, Any]:
    """A failure with a text in every column that can hold text of a backend, a case file or a file name."""
    plain = record(verdict=("fail", "error", "unsupported")[number % 3], mismatches=number)
    plain |= {name: value for name in SENTENCES if name != "known" or number % 2}
    plain |= dict.fromkeys(NAMES, value[:500])
    plain["stages"] = [{"stage": value, "rule": "exact", "compared": 9, "mismatches": 9, "max_ulp": 1, "excused": 0,
                        "unbounded": None, "sentence": value}]  # fmt: skip
    plain["explanations"] = [{"cause": value, "sentence": value, "stage": value, "exact": bool(number % 2)}]
    plain["notes"] = [{"cause": value, "sentence": value}]
    plain["findings"] = [{"stage": value, "rule": "exact", "sentence": value, "modulo": {}, "heat": {}, "steps": [],
                          "elements": [{"which": value, "x": value}], "census": {}}]  # fmt: skip
    return Record(**plain).to_dict()


@pytest.fixture(scope="module")
def hostile() -> list[dict[str, Any]]:
    return [hostile_record(value, number) for number, value in enumerate(HOSTILE)]


@pytest.fixture(scope="module")
def folder(hostile: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A written report."""
    path = tmp_path_factory.mktemp("report")
    report.write(hostile, {value[:200]: value for value in HOSTILE}, path, elapsed=1.0)
    return path


def printed(records: list[dict[str, Any]], width: int) -> str:
    file = io.StringIO()
    report.print_summary(records, Console(file=file, width=width))
    return file.getvalue()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("index", range(len(HOSTILE)))
def test_what_a_terminal_or_a_log_gets_is_plain(hostile: list[dict[str, Any]], index: int) -> None:
    one = hostile[index]
    shown = {
        "first failure": first_failure(one), "reproduction": reproduction(one), "skip": one["message"],
        "not compared": text.not_compared([one]), "notes": text.note_counts([one]), "summary": printed([one], 80),
        "narrow summary": printed([one], 60), "properties": "\n".join(value for _, value in properties(one)),
    }  # fmt: skip
    for name, output in shown.items():
        assert not UNSAFE.search(output), name
        assert not COMMAND.search(output), name
    (annotation,) = github.commands([one]) or ["::error ::"]
    assert not UNSAFE.search(annotation)
    assert "\n" not in annotation
    assert not re.search(r"##\w*\[", annotation)


class Elements(HTMLParser):
    """Elements and attributes of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_the_page_has_no_element_of_a_record(folder: Path, hostile: list[dict[str, Any]]) -> None:
    html = (folder / "index.html").read_text(encoding="utf-8")
    assert not UNSAFE.search(html)
    seen = Elements(html).seen
    assert [tag for tag, _ in seen].count("script") == 2
    assert not {tag for tag, _ in seen} & {"img", "svg", "iframe", "object", "embed", "base"}
    assert not [name for _, attributes in seen for name in attributes if name.startswith("on")]
    links = [str(attributes["href"]) for tag, attributes in seen if tag == "a"]
    assert all(link.startswith("#") or link in ("records.parquet", "records.csv", "summary.md") for link in links)
    assert "49" not in re.findall(r"<title>(.*?)</title>", html)[0]
    page = island(html)
    assert page["rows"] == len(hostile)
    assert sum(map(len, page["notes"].values())) <= len(hostile)


def test_the_notes_of_a_passed_case_are_on_the_page_and_counted(tmp_path: Path) -> None:
    notes = [{"cause": "changes-rounding-mode", "sentence": "rounds up"}, {"cause": "a", "sentence": "b"}]
    passed = [record("x", notes=notes), record("y", notes=notes[:1]), record("z")]
    page = report.write(passed, {}, tmp_path, elapsed=1.0).read_text(encoding="utf-8")
    counts = "3 notes: changes-rounding-mode 2, a 1"
    lines = ["note, changes-rounding-mode: rounds up", "note, a: b"]
    assert island(page)["notes"] == {"0": lines, "1": lines[:1]}
    assert counts in page
    assert counts in (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert counts in printed(passed, 80)
    assert first_failure(passed[0]).splitlines()[-2:] == lines
    assert text.note_counts([record()]) == ""
    assert "notes" not in markdown.render([record()], {}, 1.0)


def test_no_cell_of_a_csv_is_a_formula(folder: Path, hostile: list[dict[str, Any]]) -> None:
    with (folder / "records.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(hostile)
    cells = [row[name] for row in rows for name in TEXT]
    assert not [cell for cell in cells if cell[:1] and cell[0] in "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"]
    assert "'=1+1" in cells
    assert {row["seconds"] for row in rows} == {"0.5"}
    values = pyarrow.parquet.read_table(folder / "records.parquet").to_pylist()
    assert "=1+1" in [value["message"] for value in values]


def test_the_summary_has_no_html_and_no_link_of_a_record(folder: Path) -> None:
    summary = (folder / "summary.md").read_text(encoding="utf-8")
    assert not UNSAFE.search(summary)
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", summary)
    assert not re.search(r"(?<!\\)<(?!/?$)", outside)
    assert re.findall(r"(?<!\\)\]\(([^)]*)\)", outside) == ["index.html"]
    assert not re.search(r"^#+ heading", summary, re.MULTILINE)
