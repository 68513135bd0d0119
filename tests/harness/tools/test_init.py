"""`narrowgauge init`: the written files, and its treatment of a user's files."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowgauge.harness.cli import app
from narrowgauge.harness.tools.init import repository
from tests.paths import ROOT

WRITTEN = [
    ".github/workflows/narrowgauge.yml", ".gitignore", ".pre-commit-config.yaml", "kernel_cases/nvfp4.toml",
    "narrowgauge_backend.py", "pytest.ini", "reports/baselines/host.json",
]  # fmt: skip
SETTINGS = ["kernel_cases"], "narrowgauge_backend:Backend"


def init(folder: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["init", str(folder), *options])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def states(folder: Path) -> dict[str, str]:
    return {step.path: step.state for step in repository.initialize(folder, "me/narrowgauge@v1")}


def test_an_empty_folder_has_all_files(tmp_path: Path) -> None:
    done = init(tmp_path / "new", "--action", "me/narrowgauge@v1")
    assert done.exit_code == 0, done.output
    assert sorted(contents(tmp_path / "new")) == WRITTEN
    assert "narrowgauge run kernel_cases --backend narrowgauge_backend:Backend" in done.output
    assert "uses: me/narrowgauge@v1\n" in (tmp_path / "new" / WRITTEN[0]).read_text()
    assert "to do" not in done.output


def test_the_wheel_has_every_template() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    kinds = {path.suffix for path in repository.TEMPLATES.iterdir() if path.is_file()}
    assert {f"*{kind}" for kind in kinds - {".py"}} <= set(project["tool"]["setuptools"]["package-data"]["*"])


def test_a_second_init_changes_nothing(tmp_path: Path) -> None:
    states(tmp_path)
    before = contents(tmp_path)
    assert states(tmp_path) == dict.fromkeys(WRITTEN, "unchanged")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["narrowgauge_backend.py", "reports/baselines/host.json", WRITTEN[0]])
def test_a_file_of_the_user_is_kept(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine\n")
    done = init(tmp_path, "--action", "me/narrowgauge@v1")
    assert f"kept       {name}: it has other content; move {name} away" in done.output
    assert (tmp_path / name).read_text() == "mine\n"
    assert done.exit_code == 0


PYTEST_FILES = {
    "pytest.ini": "[pytest]\naddopts = -q\n",
    "pytest.toml": "[pytest]\naddopts = ['-q']\n",
    "tox.ini": "[tox]\nenv = x\n[pytest]\naddopts = -q\n",
    "setup.cfg": "[metadata]\nname = x\n[tool:pytest]\naddopts = -q\n",
    "pyproject.toml": "[project]\nname = 'x'\n\n[tool.pytest.ini_options]\naddopts = '-q'\n",
}


@pytest.mark.parametrize("name", PYTEST_FILES)
def test_a_file_with_settings_of_pytest_is_not_changed(name: str, tmp_path: Path) -> None:
    """The user adds the printed lines; then nothing is left to do."""
    path = tmp_path / name
    path.write_text(PYTEST_FILES[name])
    done = init(tmp_path, "--action", "me/narrowgauge@v1")
    assert path.read_text() == PYTEST_FILES[name]
    assert f"to do      {name}: pytest's settings are there; add to [" in done.output
    assert not [other for other in PYTEST_FILES if other != name and (tmp_path / other).exists()]
    lines = [line.strip() for line in done.output.splitlines() if line.startswith("    narrowgauge_")]
    path.write_text("\n".join([PYTEST_FILES[name], *lines, ""]))
    assert settings(path) == SETTINGS
    assert states(tmp_path)[name] == "unchanged"


def settings(path: Path) -> tuple[list[str], str]:
    """Cases and backend of the settings in a file, as pytest reads them."""
    if path.suffix == ".toml":
        content = tomllib.loads(path.read_text())
        table = content["pytest"] if path.name == "pytest.toml" else content["tool"]["pytest"]["ini_options"]
        return table["narrowgauge_cases"], table["narrowgauge_backend"]
    parser = configparser.ConfigParser()
    parser.read_string(path.read_text())
    section = parser["tool:pytest" if path.name == "setup.cfg" else "pytest"]
    return section["narrowgauge_cases"].split(), section["narrowgauge_backend"]


@pytest.mark.parametrize("text", ["", "[project]\nname = 'x'", "[tool.ruff]\nline-length = 99\n"])
def test_a_project_without_settings_of_pytest_gets_a_section(text: str, tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(text)
    assert states(tmp_path)["pyproject.toml"] == "extended"
    assert path.read_text().startswith(text)
    assert settings(path) == SETTINGS
    assert not (tmp_path / "pytest.ini").exists()
    before = path.read_bytes()
    assert states(tmp_path)["pyproject.toml"] == "unchanged"
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["[project\n", "tool = {ruff = {line-length = 99}}\n"])
def test_a_project_that_cannot_be_extended_is_not_changed(text: str, tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(text)
    assert states(tmp_path)["pyproject.toml"] == "to do"
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("*.o\n", "; add:\n"),
        ("reports/latest/\n", "; add:\n"),
        ("*.o\n/reports/\n", "/reports/ leaves the baselines out of a commit too; write in its place:\n"),
    ],
)
def test_the_list_of_ignored_files_is_not_changed(text: str, said: str, tmp_path: Path) -> None:
    """The user writes the printed lines; then nothing is left to do."""
    path = tmp_path / ".gitignore"
    path.write_text(text)
    done = init(tmp_path, "--action", "me/narrowgauge@v1")
    assert path.read_text() == text
    assert said + "    reports/*\n    !reports/baselines/\n" in done.output
    path.write_text(text.replace("/reports/\n", "") + "/reports/*\n!/reports/baselines\n")
    assert states(tmp_path)[".gitignore"] == "unchanged"


def test_git_keeps_the_baselines_and_ignores_what_runs_write(tmp_path: Path) -> None:
    states(tmp_path)
    written = ["reports/latest/index.html", "reports/history.sqlite", "reports/shard-1/records.jsonl"]
    for name in written:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    listed = ["git", "ls-files", "--others", "--exclude-standard"]
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    found = subprocess.run(listed, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.splitlines()
    assert sorted(found) == WRITTEN


def test_a_file_of_pre_commit_is_not_changed(tmp_path: Path) -> None:
    """The user adds the printed lines; then the file has both hooks."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; it comes with the docs extra")
    path = tmp_path / ".pre-commit-config.yaml"
    path.write_text("repos:\n  - repo: mine\n    hooks: []\n")
    done = init(tmp_path, "--action", "me/narrowgauge@v1")
    assert path.read_text() == "repos:\n  - repo: mine\n    hooks: []\n"
    lines = done.output.partition("add to repos:\n")[2].partition("next, in")[0]
    path.write_text(path.read_text() + lines)
    assert states(tmp_path)[path.name] == "unchanged"
    template = yaml.safe_load((repository.TEMPLATES / "pre_commit.yml").read_text())
    assert yaml.safe_load(path.read_text())["repos"] == [{"repo": "mine", "hooks": []}, *template["repos"]]


@pytest.mark.parametrize(("run", "gate", "status"), [(0, 0, 0), (1, 0, 0), (0, 1, 1), (1, 1, 1), (2, 0, 1)])
def test_the_status_of_the_hook_of_pre_commit(run: int, gate: int, status: int, tmp_path: Path) -> None:
    """A failing case is for the gate to judge. A run that could not start stops the commit."""
    (tmp_path / "narrowgauge").write_text(f"#!/bin/sh\n[ $1 = run ] && exit {run}\nexit {gate}\n")
    (tmp_path / "narrowgauge").chmod(0o755)
    text = (repository.TEMPLATES / "pre_commit.yml").read_text()
    entry = " ".join(text.partition("entry: >-")[2].partition("files:")[0].split())
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(shlex.split(entry), env=environ, check=False).returncode == status


@pytest.mark.parametrize("name", ["kernel_cases", ".github"])
def test_a_file_in_the_place_of_a_folder_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    done = init(tmp_path)
    assert done.exit_code == 2
    assert f"{tmp_path / name}" in done.output
    assert (tmp_path / name).read_text() == "mine"


class Installed:
    """A distribution that pip installed from `source`."""

    def __init__(self, source: dict[str, Any] | None) -> None:
        self.source = source

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.source is None else json.dumps(self.source)


@pytest.mark.parametrize(
    ("source", "action"),
    [
        (
            {"url": "https://github.com/me/narrowgauge.git", "vcs_info": {"vcs": "git", "commit_id": "f00d"}},
            "me/narrowgauge@f00d",
        ),
        ({"url": "https://example.org/me/narrowgauge", "vcs_info": {"vcs": "git", "commit_id": "f00d"}}, ""),
        ({"url": "file:///checkout", "dir_info": {"editable": True}}, ""),
        (None, ""),
    ],
)
def test_the_action_is_the_repository_of_narrowgauge(
    source: dict[str, Any] | None, action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository.metadata, "distribution", lambda name: Installed(source))
    assert repository.installed_from() == action
    done = init(tmp_path)
    assert f"uses: {action or '<owner>/narrowgauge@<ref>'}\n" in (tmp_path / WRITTEN[0]).read_text()
    assert ("to do      .github/workflows/narrowgauge.yml: put the repository" in done.output) is (not action)


def test_an_action_without_a_revision_is_refused(tmp_path: Path) -> None:
    done = init(tmp_path, "--action", "me/narrowgauge")
    assert (done.exit_code, "owner/narrowgauge@ref" in done.output) == (2, True)
    assert not contents(tmp_path)
