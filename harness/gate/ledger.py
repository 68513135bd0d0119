"""The ledger of known failures: cases expected to fail, with a reason and the link to an issue.

The file is `known.toml` beside the case files, with `[[known]]` tables; cases/README.md describes its schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from narrowgauge.harness.cases import toml_file
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.case_file import LEDGER
from narrowgauge.harness.cases.keys import nearest, one_of, shown
from narrowgauge.harness.cases.operations import OPERATIONS

VERDICTS = ("fail", "error", "crash", "timeout")
"""Verdicts allowed in an entry."""
CRASHING = ("crash", "timeout")
"""Cases with these expected verdicts are not launched."""
DEVICES = ("cpu", "cuda")
REQUIRED = ("case", "backend", "issue", "reason")
OPTIONAL = ("verdict", "stage", "cause", "device")
SHOWN = 5
"""Largest number of entries in an error message. The message counts the omitted entries."""
MOST = 1000
"""Entries of a ledger."""


class LedgerError(Exception):
    """An invalid ledger. The message names the file, the entry and the remedy."""


@dataclass(frozen=True)
class Entry:
    """A `[[known]]` table: cases of a backend that are expected to fail."""

    case: str
    """Pattern of the id as in fnmatch: `*` matches any text, with slashes."""
    backend: str
    issue: str
    reason: str
    verdict: str = "fail"
    stage: str = ""
    """First wrong stage, or empty for any stage."""
    cause: str = ""
    """Cause of an explanation (`harness.diagnosis`), or empty for any cause."""
    device: str = ""
    """Device on which the cases fail, or empty for every device."""
    location: str = ""
    """File and number of the table, for messages."""

    @cached_property
    def _matches(self) -> Callable[[str], object]:
        return re.compile(translate(self.case)).match

    def matches(self, case: str) -> bool:
        """Whether the pattern matches the id of a case."""
        return bool(self._matches(case))

    def runs_on(self, backend: str, device: str) -> bool:
        """Whether the entry applies to this backend on this device."""
        return self.backend == backend and self.device in ("", device)

    def expects(self, record: dict[str, Any]) -> bool:
        """Whether a record failed with the entry's verdict, stage and cause."""
        return (
            record["verdict"] == self.verdict
            and self.stage in ("", record["stage"])
            and (not self.cause or any(explanation["cause"] == self.cause for explanation in record["explanations"]))
        )

    @property
    def note(self) -> str:
        """Reason and issue link: the column `known` of a record."""
        return f"{self.reason} ({self.issue})"


@dataclass(frozen=True)
class Ledger:
    """The entries of a run. An empty ledger has no effect."""

    entries: tuple[Entry, ...] = ()

    def check(self, cases: Iterable[Case], folders: Iterable[Path] = ()) -> None:
        """Raise LedgerError if an entry matches no case or all cases.

        A run may load a single case file. The other files of `folders` are read only if an entry matches none or all of
        the loaded cases, and count too.
        """
        ids = [case.id for case in cases]
        wrong = self._mistaken(self.entries, ids)
        if wrong and (folders := list(folders)):
            from narrowgauge.harness.cases.case_file import load_all

            ids = [case.id for case in load_all(folders)]
            wrong = self._mistaken(wrong, ids)
        if not wrong:
            return
        complaints = [
            f"{entry.location}: case {shown(entry.case)} matches "
            + (f"all {len(ids)} cases" if any(map(entry.matches, ids)) else f"no case{nearest(entry.case, ids)}")
            for entry in wrong[:SHOWN]
        ]
        if len(wrong) > SHOWN:
            complaints.append(f"and {len(wrong) - SHOWN} more")
        raise LedgerError("; ".join(complaints) + ": correct or narrow the pattern, or delete the entry")

    @staticmethod
    def _mistaken(entries: Iterable[Entry], ids: Sequence[str]) -> list[Entry]:
        """Entries that match no case, or all of several cases."""

        def mistaken(entry: Entry) -> bool:
            return not any(map(entry.matches, ids)) or (len(ids) > 1 and all(map(entry.matches, ids)))

        return [entry for entry in entries if mistaken(entry)]

    def entries_for(self, case: str, backend: str, device: str) -> list[Entry]:
        """Entries for a case on a backend and a device. A failure is known if any entry expects the failure."""
        return [entry for entry in self.entries if entry.runs_on(backend, device) and entry.matches(case)]

    def stand_in(self, case: Case, *, backend: str, device: str, seed: int) -> dict[str, Any] | None:
        """The record of a case not launched because of a known crash or hang. None if the case is launched."""
        from narrowgauge.harness.records.record import new_record

        for entry in self.entries_for(case.id, backend, device):
            if entry.verdict in CRASHING:
                record = new_record(case, backend=backend, device=device, seed=seed)
                record.verdict, record.known, record.message = entry.verdict, entry.note, f"not run: {entry.reason}"
                return record.to_dict()
        return None

    def launchable(self, cases: Iterable[Case], *, backend: str, device: str) -> list[Case]:
        """The cases that are not expected to crash or hang."""
        return [
            case
            for case in cases
            if not any(entry.verdict in CRASHING for entry in self.entries_for(case.id, backend, device))
        ]

    def mark(self, record: dict[str, Any]) -> None:
        """Fill the column `known` of a record. The message of an unexpected pass names the entry."""
        entries = self.entries_for(record["case"], record["backend"], record["device"])
        if entries and record["verdict"] == "pass":
            entry = entries[0]
            narrower = "" if entry.case == record["case"] else ", or narrow its pattern"
            record["known"] = entry.note
            record["message"] = f"passes, though it is known to fail: delete {entry.location}{narrower}"
        elif entry_ := next((entry for entry in entries if entry.expects(record)), None):
            record["known"] = entry_.note


class Ledgers:
    """Ledgers of a run with case files in several folders. A ledger is read and checked once."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        """`ledger` replaces the ledgers beside the case files."""
        self._given = ledger
        self._found: dict[Path, Ledger] = {}

    def ledger_for(self, folder: Path, cases: Iterable[Case]) -> Ledger:
        """The ledger of the case files in a folder; `cases` are the cases of one of the files.

        Raises LedgerError, or CaseFileError as `Ledger.check` does, only at the first call for a folder: a single error
        for many case files.
        """
        if folder not in self._found:
            self._found[folder] = Ledger()
            ledger = load_beside([folder]) if self._given is None else self._given
            ledger.check(cases, [folder])
            self._found[folder] = ledger
        return self._found[folder]


def load(path: Path) -> Ledger:
    """The ledger in a file, possibly empty. Raises LedgerError if the file cannot be read or is invalid."""
    tables = toml_file.read(path, "known", what="a ledger", error=LedgerError)
    if tables is None:
        return Ledger()
    if not isinstance(tables, list):
        raise LedgerError(f"{path}: known is {type(tables).__name__}; a ledger holds [[known]] tables")
    if len(tables) > MOST:
        raise LedgerError(f"{path}: has {len(tables)} [[known]] tables, at most {MOST}; join entries by patterns")
    entries: dict[Entry, Entry] = {}
    for number, table in enumerate(tables, 1):
        entry = _entry(table, f"{path}: [[known]] {number}")
        first = entries.setdefault(replace(entry, issue="", reason="", location=""), entry)
        if first is not entry:
            raise LedgerError(f"{entry.location}: expects the same failures as {first.location}; delete one of the two")
    return Ledger(tuple(entries.values()))


def load_beside(paths: Sequence[Path]) -> Ledger:
    """The ledger of a run: the entries of every known.toml beside the case files, or in the folders, `paths`.

    Raises LedgerError if a file is invalid.
    """
    files = (folder / LEDGER for folder in folders_of(paths))
    return Ledger(tuple(entry for file in files if file.is_file() for entry in load(file).entries))


def folders_of(paths: Iterable[Path]) -> list[Path]:
    """Folders of case files, without duplicates. A folder stands for itself."""
    return list(dict.fromkeys(path if path.is_dir() else path.parent for path in paths))


def _entry(table: Any, location: str) -> Entry:
    if not isinstance(table, dict):
        raise LedgerError(f"{location}: is {shown(table)}; an entry is a table of keys")
    keys = [*REQUIRED, *OPTIONAL]
    for key, value in table.items():
        if key not in keys:
            raise LedgerError(f"{location}: unknown key {key!r}{nearest(key, keys)}; an entry has {', '.join(keys)}")
        if not isinstance(value, str) or not value.strip():
            raise LedgerError(f"{location}: {key} is {shown(value)}; it is text, and not empty")
    for key in REQUIRED:
        if key not in table:
            raise LedgerError(f"{location}: {key} is missing; an entry needs {', '.join(REQUIRED)}")
    checks = {"issue": _link, "verdict": one_of(VERDICTS), "device": one_of(DEVICES)}
    for key, check in checks.items():
        if key in table and (wrong := check(table[key])):
            raise LedgerError(f"{location}: {key} {wrong}")
    if table.get("verdict", "fail") != "fail" and (conflicting := [key for key in ("stage", "cause") if key in table]):
        raise LedgerError(
            f"{location}: {conflicting[0]} says how a fail is wrong, and the verdict is {table['verdict']}"
        )
    for key, wrong in (("stage", _stage(table)), ("cause", _cause(table))):
        if wrong:
            raise LedgerError(f"{location}: {key} {wrong}")
    return Entry(**table, location=location)


def _stage(table: dict[str, str]) -> str | None:
    """Error in the stage of an entry, if its pattern names an operation."""
    from narrowgauge.harness.cases.operations import stage_names

    stage, operation = table.get("stage"), table["case"].partition("/")[0]
    names = stage_names(operation)
    if stage is None or not names or stage in names:
        return None
    return f"is {shown(stage)}{nearest(stage, names)}; of {operation} it can be {', '.join(names)}"


def _cause(table: dict[str, str]) -> str | None:
    """Error in the cause of an entry, or None."""
    from narrowgauge.harness.diagnosis.cause_names import CAUSES, FAMILIES, is_cause

    cause = table.get("cause")
    if cause is None or is_cause(cause) or _is_deviation(cause):
        return None
    close = nearest(cause, [*CAUSES, *(f"{family}…" for family in FAMILIES)])
    return (
        f"is {shown(cause)}{close}; it is one of the column explanations, and harness/diagnosis/causes.md has them all"
    )


def _is_deviation(cause: str) -> bool:
    """Whether an operation has a known mistake with this name."""
    from narrowgauge.harness.operations.registry import operation_called

    return any(cause in operation_called(name).deviations for name in OPERATIONS)


def _link(value: str) -> str | None:
    """Error in a link, else None."""
    return None if is_link(value) else f"is {shown(value)}; it is a link: https://…"


def is_link(value: str) -> bool:
    """Whether `value` is a web address: http or https, a host, no space."""
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and not re.search(r"\s", value)
    except ValueError:
        return False
