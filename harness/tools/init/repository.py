"""Writing the first files of a repository: backend, cases, baseline, workflow, settings of pytest, git and pre-commit.

The files are those of `templates/`. No file is overwritten. A setting that belongs into a file of the user is appended
if the file allows it, else the user is told the lines.
"""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

TEMPLATES = Path(__file__).with_name("templates")
FILES = {
    "narrowgauge_backend.py": "narrowgauge_backend.py",
    "kernel_cases/nvfp4.toml": "nvfp4.toml",
    "reports/baselines/host.json": "host.json",
    ".github/workflows/narrowgauge.yml": "workflow.yml",
}
"""Template by the path of the file in the repository."""
UNKNOWN_ACTION = "<owner>/narrowgauge@<ref>"
"""Action in the template of the workflow. GitHub refuses it, and runs nobody else's repository."""
IGNORED = ("reports/*", "!reports/baselines/")
"""Lines of .gitignore: reports, shards and the history are no part of a commit, and baselines are."""
PRE_COMMIT = ".pre-commit-config.yaml"


class InitError(Exception):
    """A file cannot be written. The message names the file and the reason."""


@dataclass(frozen=True)
class Step:
    """What became of a file."""

    path: str
    """Path in the repository."""
    state: str
    """`written`, `extended`, `unchanged`, `kept` (the user's file has other content) or `to do`."""
    remedy: str = ""
    """What the user can do, with the lines to add. Empty if nothing is left to do."""


def initialize(folder: Path, action: str = "") -> list[Step]:
    """Write the files into `folder`; a missing folder is made.

    `action`: the GitHub action in the workflow, `owner/repository@ref`; empty: the repository that narrowgauge was
    installed from. Raises InitError if a file cannot be written.
    """
    action = action or installed_from() or UNKNOWN_ACTION
    steps = []
    for name, template in FILES.items():
        text = (TEMPLATES / template).read_text(encoding="utf-8").replace(UNKNOWN_ACTION, action)
        steps.append(_write(folder, name, text))
    steps += [_pytest_settings(folder), _ignored(folder), _pre_commit(folder)]
    workflow = ".github/workflows/narrowgauge.yml"
    if UNKNOWN_ACTION in (folder / workflow).read_text(encoding="utf-8"):
        remedy = f"put the repository on GitHub that has narrowgauge in the place of {UNKNOWN_ACTION}"
        steps.append(Step(workflow, "to do", remedy))
    return steps


def installed_from() -> str:
    """`owner/repository@commit` of the GitHub repository that pip installed narrowgauge from (PEP 610), else empty."""
    with suppress(metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        source = json.loads(metadata.distribution("narrowgauge").read_text("direct_url.json") or "{}")
        match = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(\.git)?/?", source["url"])
        if match:
            return f"{match[1]}@{source['vcs_info']['commit_id']}"
    return ""


def _write(folder: Path, name: str, text: str) -> Step:
    """Write a new file, or say what is there."""
    path = folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        if not path.is_file():
            raise InitError(f"{error.filename or path}: is there, and no file of this name can be made") from error
        if _text(path) == text:
            return Step(name, "unchanged")
        return Step(name, "kept", f"it has other content; move {name} away and run init again to have it anew")
    except OSError as error:
        raise InitError(f"{error.filename or path}: cannot be written: {error.strerror}") from error
    return Step(name, "written")


def _append(folder: Path, name: str, text: str) -> Step:
    try:
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InitError(f"{folder / name}: cannot be written: {error.strerror}") from error
    return Step(name, "extended")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InitError(f"{path}: cannot be read: {error}") from error


def _pytest_settings(folder: Path) -> Step:
    """Settings of the pytest plugin, in the file that pytest reads."""
    ini, toml = ((TEMPLATES / f"settings.{kind}").read_text(encoding="utf-8") for kind in ("ini", "toml"))
    for name, section in _pytest_files(folder):
        return _told(folder, name, section, toml if name.endswith(".toml") else ini)
    project = folder / "pyproject.toml"
    if not project.exists():
        return _write(folder, "pytest.ini", ini)
    before = _text(project)
    addition = ("" if before.endswith("\n") or not before else "\n") + "\n" + toml
    try:
        tomllib.loads(before + addition)
    except tomllib.TOMLDecodeError:  # invalid already, or [tool] is an inline table
        return _told(folder, "pyproject.toml", "tool.pytest.ini_options", toml)
    return _append(folder, "pyproject.toml", addition)


def _pytest_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Files of the folder that have settings of pytest, with their section. pytest reads the first of them."""
    for name in ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"):
        if (folder / name).exists():
            yield name, "pytest"
    if (project := folder / "pyproject.toml").exists():
        with suppress(tomllib.TOMLDecodeError):
            if "pytest" in tomllib.loads(_text(project)).get("tool", {}):
                yield project.name, "tool.pytest.ini_options"
    for name, section in (("tox.ini", "pytest"), ("setup.cfg", "tool:pytest")):
        if (folder / name).exists() and _has_section(folder / name, section):
            yield name, section


def _has_section(path: Path, section: str) -> bool:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    with suppress(configparser.Error):
        parser.read_string(_text(path))
    return parser.has_section(section)


def _told(folder: Path, name: str, section: str, template: str) -> Step:
    """Name the missing lines for a file of the user."""
    if "narrowgauge_cases" in _text(folder / name):
        return Step(name, "unchanged")
    lines = "\n".join(f"    {line}" for line in template.splitlines()[1:])
    return Step(name, "to do", f"pytest's settings are there; add to [{section}]:\n{lines}")


def _ignored(folder: Path) -> Step:
    """Lines of .gitignore. A line that ignores the whole folder of reports would also ignore the baselines."""
    name, added = ".gitignore", "\n".join(f"    {line}" for line in IGNORED)
    if not (folder / name).exists():
        return _write(folder, name, "".join(f"{line}\n" for line in IGNORED))
    lines = _text(folder / name).splitlines()
    have = {line.strip().replace("!/", "!").strip("/") for line in lines}
    if "reports" in have:
        whole = next(line for line in lines if line.strip().strip("/") == "reports")
        return Step(name, "to do", f"{whole} leaves the baselines out of a commit too; write in its place:\n{added}")
    if {line.strip("/") for line in IGNORED} <= have:
        return Step(name, "unchanged")
    return Step(name, "to do", f"reports of runs are no part of a commit, and baselines are; add:\n{added}")


def _pre_commit(folder: Path) -> Step:
    """The hook of pre-commit, in a new file; for a file of the user its lines."""
    text = (TEMPLATES / "pre_commit.yml").read_text(encoding="utf-8")
    if not (folder / PRE_COMMIT).exists():
        return _write(folder, PRE_COMMIT, text)
    if "id: narrowgauge" in _text(folder / PRE_COMMIT):
        return Step(PRE_COMMIT, "unchanged")
    _, hook = text.rstrip().split("repos:\n", 1)
    return Step(PRE_COMMIT, "to do", f"hooks of yours are there; add to repos:\n{hook}")
