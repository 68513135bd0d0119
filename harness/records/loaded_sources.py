"""Sources of a run beside those of its header: the files, packages and variables on which the results of a user's
backend depend. They are known only when the backend has loaded them, some by a method.

An entry is a text by a key: `file kernels/nv.py` and 16 digits of its SHA-256, `package flashinfer-python` and its
version, `variable NV_TILE` and its value. Another process computes the entry of a key again without the user's code.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any

from narrowgauge.harness.backends.loading import owner_of, repository_of

KINDS = FILE, PACKAGE, VARIABLE = "file", "package", "variable"
"""First words of keys."""
CHANGED = "changed"
"""Entry of a file, package or variable changed during the run."""
ABSENT = ""
"""Entry of an unset variable."""
_LARGEST = 1 << 32
"""Largest size in bytes of a file with a digest."""
_DIGITS = 16
_COMPILED = (".cu", ".cuh", ".hip", ".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".ptx", ".cubin", ".fatbin")
"""Suffixes of sources and of kernels, not imported by Python."""
_NAMED = 3
"""Largest number of files named in a sentence."""


@dataclass
class LoadedSources:
    """Collects the entries of a run."""

    entries: dict[str, str] = field(default_factory=dict)
    unverified: dict[str, str] = field(default_factory=dict)
    """Reasons by the names of sources without a later comparison."""
    _folder: str = ""
    """Folder of the module of the backend."""
    _declared: Mapping[str, list[str]] = field(default_factory=dict)

    def add(self, news: Mapping[str, Any]) -> None:
        """Add the loaded sources of a kernel host: `files`, `packages` and `folder` of
        `harness.backends.loading.Loaded`, and `declared`, the declarations `sources` and `environment` of the
        backend."""
        self._folder, self._declared = news["folder"], news["declared"]
        for file in news["files"]:
            if owner_of(file) == "user":
                self._add_file(file)
        for name in sorted({found for module in news["packages"] for found in _distributions().get(module, ())}):
            if name != "narrowgauge":
                self._note(f"{PACKAGE} {name}", _package(name))
        for name in self._declared.get("environment", ()):
            self._note(f"{VARIABLE} {name}", os.environ.get(name, ABSENT))
        if news["files"]:
            self._add_declared()

    def _add_declared(self) -> None:
        """Add the declared sources, and name the undeclared."""
        for pattern in self._declared.get("sources", ()):
            found = sorted(glob.glob(os.path.join(self._folder, pattern), recursive=True))
            files = [file for file in found if os.path.isfile(file)]
            self.unverified.pop(name := f"declared sources {pattern}", None)
            if not files:
                self.unverified[name] = f"no file of this name in {_shown(self._folder)}"
            for file in files:
                self._add_file(file)
        if "sources" not in self._declared and (files := self._beside()):
            more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
            names = ", ".join(files[:_NAMED])
            self.unverified["compiled sources"] = (
                f'{names}{more}: name those of the kernel in the backend: declares = {{"sources": ["{files[0]}"]}}'
            )

    def _beside(self) -> list[str]:
        """Compiled sources in the folders of the user's modules and in their folders, relative to the backend's."""
        folders = {Path(_path(key)).parent for key in self.entries if key.startswith(f"{FILE} ")}
        found = [file for folder in folders for part in ("*", "*/*") for file in folder.glob(part)]
        files = {file for file in found if file.suffix in _COMPILED and owner_of(os.path.abspath(file)) == "user"}
        return sorted(os.path.relpath(file, self._folder) for file in files if not file.parent.name.startswith("."))

    def _add_file(self, file: str) -> None:
        name = _shown(file)
        try:
            self._note(f"{FILE} {name}", _digest(file))
        except OSError as error:
            self.unverified[name] = f"it cannot be read: {error.strerror}"

    def _note(self, key: str, entry: str) -> None:
        self.entries[key] = entry if self.entries.get(key, entry) == entry else CHANGED


def differences(entries: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Sentences on the entries of a run that differ in this process, and sentences on entries without a comparison.
    Imports no code of the user."""
    changed, notes = [], []
    files = [key for key in entries if key.startswith(f"{FILE} ")]
    if files and not any(os.path.exists(_path(key)) for key in files):
        first = min(files).removeprefix(f"{FILE} ")
        many = f"{len(files)} files of the backend, the first {first}, are" if len(files) > 1 else f"{first} is"
        notes.append(f"{many} not in {Path.cwd()}; start in the folder of the run to compare the sources")
        entries = {key: entry for key, entry in entries.items() if key not in files}
    for key, entry in sorted(entries.items()):
        kind, _, name = key.partition(" ")
        if entry == CHANGED:
            changed.append(f"{key} changed while the cases ran")
        elif kind == FILE:
            changed += _file_change(name, entry)
        elif kind == VARIABLE and (now := os.environ.get(name, ABSENT)) != entry:
            changed.append(f"environment {key} {_value(entry, 'was')} in the run, and {_value(now, 'is')} now")
        elif kind == PACKAGE:
            try:
                changed += _package_change(name, entry, _package(name))
            except PackageNotFoundError:
                notes.append(f"{name} {entry.partition(' ')[0]}: the package is not installed here")
        elif kind not in KINDS:
            changed.append(f"{key!a} is no {', '.join(KINDS)}")
    return changed, notes


def _file_change(name: str, entry: str) -> list[str]:
    try:
        same = _digest(_path(f"{FILE} {name}")) == entry
    except (FileNotFoundError, NotADirectoryError):
        return [
            f"{name} is not there: it was moved or deleted since the run, or the run began in another folder than "
            f"{Path.cwd()}"
        ]
    except OSError as error:
        return [f"{name} cannot be read: {error.strerror}"]
    return [] if same else [f"{name} has changed since the run"]


def _package_change(name: str, entry: str, now: str) -> list[str]:
    versions = [text.partition(" ")[0] for text in (entry, now)]
    if versions[0] != versions[1]:
        return [f"package {name} was {versions[0]} in the run, and is {versions[1]} now"]
    return [] if entry == now else [f"package {name} {versions[0]} was installed again since the run, with other files"]


def _value(text: str, verb: str) -> str:
    return f"{verb} {text!r}" if text != ABSENT else f"{verb} not set"


def _shown(file: str) -> str:
    """Path of a file in an entry: relative to the current folder within this folder and its repository."""
    here = os.getcwd()
    top = repository_of(here) or here
    return os.path.relpath(file, here) if Path(file).is_relative_to(top) else file


def _path(key: str) -> str:
    return os.path.abspath(key.removeprefix(f"{FILE} "))


def _digest(file: str) -> str:
    """Digits of the SHA-256 of a regular file. Raises OSError for any other."""
    # O_NONBLOCK: a named pipe would wait for its writer.
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
            raise OSError(0, f"it is no regular file of at most {_LARGEST >> 30} GiB")
        state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if state not in _known:
            _known[state] = hashlib.file_digest(opened, "sha256").hexdigest()[:_DIGITS]
        return _known[state]


_known: dict[tuple[int, ...], str] = {}
"""Digests of files by device, number, size and time: with --fresh-host every case names the same files."""


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Names of the installed distributions by top-level module."""
    return packages_distributions()


@cache
def _package(name: str) -> str:
    """Version of a distribution, and digits of the list of its files, if the installer left one.

    Raises PackageNotFoundError if it is not installed."""
    found = distribution(name)
    files = _installed_files(found)
    listed = hashlib.sha256("\n".join(files).encode()).hexdigest()[:_DIGITS]
    return f"{found.version} {listed}" if files else found.version


def _installed_files(found: Distribution) -> list[str]:
    """Files of a distribution with their digests, as recorded by the installer, without the files written by the
    installer itself: metadata and commands."""
    rows: Iterable[list[str]] = csv.reader((found.read_text("RECORD") or "").splitlines())
    return sorted(
        f"{row[0]} {row[1]}" for row in rows
        if len(row) > 1 and row[1] and not row[0].startswith("..") and ".dist-info/" not in row[0]
    )  # fmt: skip
