"""Citations and links have targets; task pages begin with the task; the site has no warning; short names of tests."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import narrowgauge
from tests.paths import ROOT

SUFFIXES = {".py", ".cu", ".cuh", ".h", ".md", ".toml", ".html", ".js", ".yml"}
CITATION = re.compile(r"\bdocs/([a-z]+)\.md(?:#([\w-]+))?")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:narrowgauge|reference|native|harness|cases|tests|reports|docs|examples)/[\w./-]*)`")
STAY = re.compile(r"`((?:harness|native|reference)/[\w./-]+\.(?:py|cu)):([\w.]+)`")
"""A file and a function, or a class, in it."""
TERMS = 50
"""Rows of the glossary at most."""
TASKS = (
    "adapt", "api", "backends", "bench", "certify", "checkpoints", "conformance", "contracts", "dialects", "gate",
    "guards", "libraries", "mutants", "pytest", "recipes", "running", "schema", "tolerance", "training", "untrusted",
    "verdicts",
)  # fmt: skip


def files() -> list[Path]:
    """Text files of the project, tracked by git or new; every text file outside a git checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    names = [name for name in listed.split("\0") if name] or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.*")]
    paths = [ROOT / name for name in names if Path(name).suffix in SUFFIXES]
    return [path for path in paths if path.is_file() and not path.is_symlink() and ".venv" not in path.parts]


PAGES = [path for path in files() if path.suffix == ".md"]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"(?m)^#+\s+(.+?)\s*$", text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_citation_has_a_target() -> None:
    lost = []
    for path in files():
        for page, anchor in CITATION.findall(path.read_text(encoding="utf-8")):
            target = ROOT / "docs" / f"{page}.md"
            if not target.is_file() or (anchor and anchor not in anchors(target)):
                lost.append(f"{path.relative_to(ROOT)}: docs/{page}.md#{anchor}")
    assert not lost


def test_names_of_tests_have_at_most_60_characters() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files()
        if path.suffix == ".py" and path.is_relative_to(ROOT / "tests")
        for name in re.findall(r"(?m)^ *(?:async )?def (test_\w{56,})", path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_citations_name_the_folder() -> None:
    """A bare `numerics.md` does not tell the reader its folder."""
    bare = re.compile(r"(?<![\w/.])(?:numerics|tolerance|dialects|design|glossary|style)\.md")
    lost = [
        str(path.relative_to(ROOT))
        for path in files()
        if path.parent.name != "docs" and path != Path(__file__) and bare.search(path.read_text(encoding="utf-8"))
    ]
    assert not lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    lost = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert not lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_paths_that_a_page_names_exist(page: Path) -> None:
    named = {name for name in PATH.findall(page.read_text(encoding="utf-8")) if not name.startswith("reports/")}
    assert not {name for name in named if not (ROOT / name).exists()}


def test_the_stays_of_the_walks_exist() -> None:
    section = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("\n## Six walks\n")[1].split("\n## ")[0]
    lost = []
    for walk in section.split("\n### ")[1:]:
        stays = STAY.findall(walk)
        assert len(stays) >= 5, walk
        for file, name in stays:
            text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
            definition = r"\b{}\(" if file.endswith(".cu") else r"(?m)^ *(?:def|class) {}\b"
            if not all(re.search(definition.format(part), text) for part in name.split(".")):
                lost.append(f"{file}:{name}")
    assert not lost


def test_the_glossary_is_short() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert 20 <= len(rows) <= TERMS


@pytest.mark.parametrize("name", TASKS)
def test_a_page_begins_with_a_task_and_its_command(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    title, task, block = text.split("\n\n")[:3]
    assert title.startswith("# ")
    assert task.startswith("Task: ")
    assert block.startswith(("```sh\n", "```python\n"))


@pytest.mark.parametrize("name", ["backends", "recipes"])
def test_the_recipes_that_a_page_names_exist(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    recipes = set(re.findall(r"`((?:nvfp4|mxfp\d|fp8)[\w@.-]*)`", text))
    assert len(recipes) > 2
    for recipe in recipes:
        assert narrowgauge.recipe(recipe)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """`make docs`: cross references, links between pages, docstrings."""
    pytest.importorskip("furo", reason="furo is not installed; make docs installs it and Sphinx, and builds the site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "docs" / "api.html").read_text(encoding="utf-8").count("narrowgauge.quantize_grouped")
