"""History of runs: figures of every finished run, in a SQLite file beside the report folders (docs/schema.md#history).

A run never fails because of its history: `append` returns a warning if the file is damaged, read-only or of another
version, and leaves such a file unchanged. SQLite's lock orders runs with the same end time.
"""

from __future__ import annotations

import math
import sqlite3
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.records.journal import RecordedRun
from narrowgauge.harness.records.record import OUTCOMES, outcome

NAME = "history.sqlite"
VERSION = 1
"""`user_version` of the file. Raised with every change of a table."""
KEPT = 500
"""Largest number of runs in a file: a run above it removes the oldest. A run with 340 rows takes 25 KB."""
DRAWN = 30
"""Largest number of runs on the page: the latest. Their labels fit into 390 px."""
_WAIT = 10.0
"""Seconds of waiting for the lock of a second run."""
_LARGEST = 2**63 - 1
"""Largest integer of SQLite."""
_TABLES = f"""
CREATE TABLE runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time TEXT NOT NULL, commit_id TEXT NOT NULL, dirty INTEGER NOT NULL,
    device TEXT NOT NULL, backend TEXT NOT NULL, tier TEXT NOT NULL, seed INTEGER NOT NULL, seconds REAL NOT NULL
);
CREATE TABLE figures (
    run INTEGER NOT NULL REFERENCES runs (id) ON DELETE CASCADE, operation TEXT NOT NULL, recipe TEXT NOT NULL,
    dtype TEXT NOT NULL, cases INTEGER NOT NULL, {" ".join(f'"{name}" INTEGER NOT NULL,' for name in OUTCOMES)}
    max_ulp INTEGER, budget_max REAL, relative_error REAL, PRIMARY KEY (run, operation, recipe, dtype)
) WITHOUT ROWID;
PRAGMA user_version = {VERSION};
"""


class HistoryError(Exception):
    """A history cannot be read. The message names the file and the reason."""


def path_beside(directory: Path) -> Path:
    """The history of the report folder `directory`: a file in its parent."""
    return directory.absolute().parent / NAME


def append(run: RecordedRun, path: Path) -> str:
    """Append the figures of a finished run to the history `path`; a missing file is made.

    Returns an empty text, or a warning with the reason and the remedy if the run could not be appended.
    """
    try:
        with _opened(path) as database:
            _append(database, run)
    except (HistoryError, OSError, OverflowError, ValueError, sqlite3.Error) as error:
        reason = str(error).removeprefix(f"{path}: ")
        return (
            f"warning: the run is not in the history {path}: {reason}. The report is complete; repair or move the "
            "file, or run with --no-history"
        )
    return ""


def history_rows(path: Path, place: tuple[str, str, str] | None = None) -> list[dict[str, Any]]:
    """Figures of all runs, oldest run first: a row for each run, operation, recipe and dtype, with the columns of both
    tables. Text is escaped. `place`: only the latest `DRAWN` runs with this device, backend and tier. Raises
    HistoryError if the file cannot be read."""
    if not path.exists():
        raise HistoryError(f"{path}: there is no such file; narrowgauge run makes it")
    try:
        with _opened(path) as database:
            database.row_factory = sqlite3.Row
            of_place = f"WHERE (device, backend, tier) = (?, ?, ?) ORDER BY id DESC LIMIT {DRAWN}" if place else ""
            query = (
                f"SELECT * FROM runs JOIN figures ON run = id WHERE id IN (SELECT id FROM runs {of_place}) "
                "ORDER BY id, operation, recipe, dtype"
            )
            rows = [dict(row) for row in database.execute(query, place or ())]
    except (OSError, sqlite3.Error) as error:
        raise HistoryError(f"{path}: cannot be read: {error}") from error
    return [{key: escape(value) if isinstance(value, str) else value for key, value in row.items()} for row in rows]


def update(run: RecordedRun, path: Path, *, complete: bool) -> tuple[str, list[dict[str, Any]]]:
    """Append a run to the history `path` if it is `complete`. Returns a warning as `append` does, and the rows of
    `history_rows` of the latest `DRAWN` runs with the backend, device and tier of `run`, for the page."""
    warning = append(run, path) if complete else ""
    try:
        rows = [] if warning or not path.exists() else history_rows(path, _place(run))
    except HistoryError:
        return warning, []  # an interrupted run does not need the file
    return warning, rows


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to the file `path`, with the tables of `VERSION`."""
    if path.exists() and not path.is_file():
        raise HistoryError(f"{path}: is no regular file")
    with closing(sqlite3.connect(path, timeout=_WAIT, isolation_level=None)) as database:
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            _create(database)
        elif version != VERSION:
            raise HistoryError(f"{path}: has version {version}, and this narrowgauge has {VERSION}")
        yield database


def _create(database: sqlite3.Connection) -> None:
    database.execute("BEGIN IMMEDIATE")
    # A run that ended at the same time may have made the tables.
    if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        for statement in filter(str.strip, _TABLES.split(";")):
            database.execute(statement)
    database.execute("COMMIT")


def _append(database: sqlite3.Connection, run: RecordedRun) -> None:
    commit, dirty = _commit(run)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    database.execute("PRAGMA foreign_keys = ON")
    database.execute("BEGIN IMMEDIATE")
    columns = "time, commit_id, dirty, device, backend, tier, seed, seconds"
    values = (now, commit, dirty, *_place(run), run.seed, run.elapsed)
    number = database.execute(f"INSERT INTO runs ({columns}) VALUES ({_marks(values)})", values).lastrowid
    for row in _figures(run.records):
        database.execute(f"INSERT INTO figures VALUES ({_marks(('', *row))})", (number, *row))
    database.execute("DELETE FROM runs WHERE id NOT IN (SELECT id FROM runs ORDER BY id DESC LIMIT ?)", (KEPT,))
    database.execute("COMMIT")


def _place(run: RecordedRun) -> tuple[str, str, str]:
    """Device, backend and tier of a run, in the form of the table `runs`."""
    device = run.environment.get("GPU", "").partition(",")[0] if run.device != "cpu" else ""
    tier = "full" if any(record["tier"] == "full" for record in run.records) else "quick"
    return device or run.device, run.backend, tier


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _figures(records: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Rows of the table `figures` without the run."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        groups[record["operation"], record["recipe"], record["dtype"]].append(record)
    rows = []
    for key, members in groups.items():
        outcomes = [outcome(record) for record in members]
        counts = [outcomes.count(name) for name in OUTCOMES]
        ulps = _largest(record["max_ulp"] for record in members)
        errors = (relative_error(record["sqnr_db"]) for record in members)
        budget = _largest(record["budget_max"] for record in members)
        rows.append(
            (*key, len(members), *counts, None if ulps is None else min(ulps, _LARGEST), budget, _largest(errors))
        )
    return rows


def _largest(values: Iterable[Any]) -> Any:
    return max((value for value in values if value is not None and not math.isnan(value)), default=None)


def relative_error(sqnr_db: float | None) -> float | None:
    """‖kernel − reference‖ / ‖reference‖ (Frobenius) of an SQNR in dB: 10^(−SQNR/20). None without an SQNR."""
    if sqnr_db is None:
        return None
    return 0.0 if sqnr_db == math.inf else math.inf if sqnr_db < -6000 else 10 ** (-sqnr_db / 20)


def _commit(run: RecordedRun) -> tuple[str, bool]:
    """Commit of the current folder and whether tracked files differ from it; outside of a repository the commit of the
    installed narrowgauge, or an empty text."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_WAIT).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        found = ""
    name = found or run.environment.get("commit", "")
    name = "" if name.startswith("unknown") else name
    return name.removesuffix("-dirty"), name.endswith("-dirty")
