"""The ledger of known failures: cases that are expected to fail, each with a reason and the link to an issue.

A TOML file of `[[known]]` tables, `known.toml` beside the case files; cases/README.md is its schema for people.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from narrowgauge.harness.cases import toml_file
from narrowgauge.harness.cases.case import LEDGER, Case
from narrowgauge.harness.cases.schema import nearest, one_of

VERDICTS = ("fail", "error", "crash", "timeout")
"""What an entry can expect."""
CRASHING = ("crash", "timeout")
"""Cases that are expected to end so are not launched."""
DEVICES = ("cpu", "cuda")
REQUIRED = ("case", "backend", "issue", "reason")
OPTIONAL = ("verdict", "stage", "cause", "device")
SHOWN = 5
"""Entries that an error names; it says how many it left out."""


class LedgerError(Exception):
    """A ledger that says something it should not: the file, the entry and what to write instead."""


@dataclass(frozen=True)
class Entry:
    """One `[[known]]` table: cases of a backend that fail, and how."""

    case: str
    """Pattern of the id, as of fnmatch: `*` stands for anything, a / too."""
    backend: str
    issue: str
    reason: str
    verdict: str = "fail"
    stage: str = ""
    """The first wrong stage; nothing where it may be any."""
    cause: str = ""
    """The cause of one of the explanations (`harness.diagnosis`); nothing where it may be any."""
    device: str = ""
    """Where the cases fail; nothing where they do everywhere."""
    where: str = ""
    """File and number of the table."""

    @cached_property
    def _matches(self) -> Callable[[str], object]:
        return re.compile(translate(self.case)).match

    def is_of(self, case: str) -> bool:
        """Whether the pattern matches the id of a case."""
        return bool(self._matches(case))

    def runs_on(self, backend: str, device: str) -> bool:
        """Whether the entry speaks of this backend on this device."""
        return self.backend == backend and self.device in ("", device)

    def expects(self, record: dict[str, Any]) -> bool:
        """Whether the record of a case that the entry is of failed as it says."""
        return (
            record["verdict"] == self.verdict
            and self.stage in ("", record["stage"])
            and (not self.cause or any(found["cause"] == self.cause for found in record["explanations"]))
        )

    @property
    def note(self) -> str:
        """The reason and the link to the issue: the column `known` of a record."""
        return f"{self.reason} ({self.issue})"


@dataclass(frozen=True)
class Ledger:
    """The entries of a run. Without one, nothing is known and nothing is changed."""

    entries: tuple[Entry, ...] = ()

    def check(self, cases: Iterable[Case], folders: Iterable[Path] = ()) -> None:
        """Raise LedgerError for entries that match none of the cases, nor of those of the case files in `folders`.

        A run may load a single file: what an entry is of may be in another beside it, which is read only then.
        """
        ids = [case.id for case in cases]
        left = [entry for entry in self.entries if not any(map(entry.is_of, ids))]
        if left and (folders := list(folders)):
            from narrowgauge.harness.cases.case import load_all

            ids = [case.id for case in load_all(folders)]
            left = [entry for entry in left if not any(map(entry.is_of, ids))]
        if left:
            named = [f"{entry.where}: case {entry.case!r} matches no case{nearest(entry.case, ids)}" for entry in left]
            if len(left) > SHOWN:
                named[SHOWN:] = [f"and {len(left) - SHOWN} more"]
            raise LedgerError("; ".join(named) + ": correct the pattern, or delete the entry")

    def of(self, case: str, backend: str, device: str) -> list[Entry]:
        """The entries that speak of a case on a backend and a device. One of them has to be right."""
        return [entry for entry in self.entries if entry.runs_on(backend, device) and entry.is_of(case)]

    def stand_in(self, case: Case, *, backend: str, device: str, seed: int) -> dict[str, Any] | None:
        """The record of a case that is not launched, since it would end its process or never end; None of others."""
        from narrowgauge.harness.records.record import new_record

        for entry in self.of(case.id, backend, device):
            if entry.verdict in CRASHING:
                record = new_record(case, backend=backend, device=device, seed=seed)
                record.verdict, record.known, record.message = entry.verdict, entry.note, f"not run: {entry.reason}"
                return record.to_dict()
        return None

    def launchable(self, cases: Iterable[Case], *, backend: str, device: str) -> list[Case]:
        """The cases that do not end their process, as far as is known, and come to an end."""
        return [
            case for case in cases if not any(entry.verdict in CRASHING for entry in self.of(case.id, backend, device))
        ]

    def mark(self, record: dict[str, Any]) -> None:
        """Fill the column `known` of a record; the message of a pass against the ledger then says which entry it is."""
        entries = self.of(record["case"], record["backend"], record["device"])
        if entries and record["verdict"] == "pass":
            entry = entries[0]
            narrower = "" if entry.case == record["case"] else ", or narrow its pattern"
            record["known"] = entry.note
            record["message"] = f"passes, though it is known to fail: delete {entry.where}{narrower}"
        elif found := next((entry for entry in entries if entry.expects(record)), None):
            record["known"] = found.note


class Ledgers:
    """The ledgers of a run that comes upon its case files one by one: each is read and checked once."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        """`ledger` takes the place of those beside the case files."""
        self._given = ledger
        self._found: dict[Path, Ledger] = {}

    def of(self, folder: Path, cases: Iterable[Case]) -> Ledger:
        """The ledger of the case files in a folder; `cases` are those of one of them.

        Raises LedgerError, and CaseFileError as `Ledger.check` does, the first time alone: one error, though there
        are many case files.
        """
        if folder not in self._found:
            self._found[folder] = Ledger()
            ledger = beside([folder]) if self._given is None else self._given
            ledger.check(cases, [folder])
            self._found[folder] = ledger
        return self._found[folder]


def load(path: Path) -> Ledger:
    """The ledger of a file, which may hold no entry. Raises LedgerError where it cannot be read or is malformed."""
    tables = toml_file.read(path, "known", what="a ledger", error=LedgerError)
    if tables is None:
        return Ledger()
    if not isinstance(tables, list):
        raise LedgerError(f"{path}: known is {type(tables).__name__}; a ledger holds [[known]] tables")
    return Ledger(tuple(_entry(table, f"{path}: [[known]] {number}") for number, table in enumerate(tables, 1)))


def beside(paths: Sequence[Path]) -> Ledger:
    """The ledger of a run of case files and folders of such: every known.toml beside them, where there is one.

    Raises LedgerError where one is malformed.
    """
    files = (folder / LEDGER for folder in folders_of(paths))
    return Ledger(tuple(entry for file in files if file.is_file() for entry in load(file).entries))


def folders_of(paths: Iterable[Path]) -> list[Path]:
    """The folders of case files, each once; a folder is its own."""
    return list(dict.fromkeys(path if path.is_dir() else path.parent for path in paths))


def _entry(table: Any, where: str) -> Entry:
    if not isinstance(table, dict):
        raise LedgerError(f"{where}: is {table!r}; an entry is a table of keys")
    known = [*REQUIRED, *OPTIONAL]
    for key, value in table.items():
        if key not in known:
            raise LedgerError(f"{where}: unknown key {key!r}{nearest(key, known)}; an entry has {', '.join(known)}")
        if not isinstance(value, str) or not value.strip():
            raise LedgerError(f"{where}: {key} is {value!r}; it is text, and not empty")
    for key in REQUIRED:
        if key not in table:
            raise LedgerError(f"{where}: {key} is missing; an entry needs {', '.join(REQUIRED)}")
    checks = {"issue": _link, "verdict": one_of(VERDICTS), "device": one_of(DEVICES)}
    for key, check in checks.items():
        if key in table and (wrong := check(table[key])):
            raise LedgerError(f"{where}: {key} {wrong}")
    if table.get("verdict", "fail") != "fail" and (given := [key for key in ("stage", "cause") if key in table]):
        raise LedgerError(f"{where}: {given[0]} says how a fail is wrong, and the verdict is {table['verdict']}")
    for key, wrong in (("stage", _stage(table)), ("cause", _cause(table))):
        if wrong:
            raise LedgerError(f"{where}: {key} {wrong}")
    return Entry(**table, where=where)


def _stage(table: dict[str, str]) -> str | None:
    """What is wrong with the stage of an entry whose pattern names an operation, or None."""
    from narrowgauge.harness.report.text import stage_names

    stage, operation = table.get("stage"), table["case"].partition("/")[0]
    names = stage_names(operation)
    if stage is None or not names or stage in names:
        return None
    return f"is {stage!r}{nearest(stage, names)}; of {operation} it can be {', '.join(names)}"


def _cause(table: dict[str, str]) -> str | None:
    """What is wrong with the cause of an entry, or None."""
    from narrowgauge.harness.diagnosis.names import CAUSES, FAMILIES, is_cause

    cause = table.get("cause")
    if cause is None or is_cause(cause):
        return None
    close = nearest(cause, [*CAUSES, *(f"{family}…" for family in FAMILIES)])
    return f"is {cause!r}{close}; it is one of the column explanations, and harness/diagnosis/names.py has them all"


def _link(value: str) -> str | None:
    """What is wrong with a link, or None."""
    return None if is_link(value) else f"is {value!r}; it is a link: https://…"


def is_link(value: str) -> bool:
    """Whether this is the address of a page: http or https, a host, and no space."""
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and not re.search(r"\s", value)
    except ValueError:
        return False
