"""The journal of a run: every record, written as it comes. Whatever ends the run costs the case under way alone.

`records.jsonl` in the folder of a report. Its first line is a header, a JSON object of the fields of `Run` but those of
`BEHIND`. Each line behind it is a record (`Record.to_dict`), and of a case the last one counts; or `{"elapsed": …}`,
the seconds that the run took so far, and the last one counts. Numbers are as Python writes them: inf is `Infinity`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from narrowgauge.harness.records.record import SCHEMA

JOURNAL = 2
"""Version of the header, and of the lines that are no records. A change of these changes it."""
NAME = "records.jsonl"
FAILURES = "failures"
"""Folder of a report that holds the saved failures of its run (`harness.running.save_failures`)."""
BEHIND = ("records", "elapsed")
"""Fields of a run that are not in the header."""
_PULSE = 1.0
"""Seconds after which the time is written beside a record: as much of it is lost where the run is killed."""


class JournalError(Exception):
    """A journal that cannot be read, written or gone on with: which, why, and what to do."""


@dataclass(frozen=True)
class Run:
    """A run, as its journal has it."""

    backend: str
    device: str
    seed: int
    cases: list[str]
    """Ids of all cases that the run selected, whether they have a record or not."""
    environment: dict[str, str]
    """What `harness.records.environment.describe_run` says."""
    sources: dict[str, str]
    """What `harness.records.environment.source_hashes` says: equal where the same code made the records."""
    shard: str | None = None
    """Which part of a matrix the cases are, "2/4"; None where they are the whole."""
    selection: str = ""
    """Of the cases of all shards: what `harness.running.shard.digest` says; nothing where the cases are the whole."""
    schedules: int = 1
    """Seeded shuffles of threads that cases ran through."""
    sanitize: bool = False
    """Whether native kernels were built with sanitizers."""
    journal: int = JOURNAL
    schema: int = SCHEMA
    """Of the records: `harness.records.record.SCHEMA`."""
    records: list[dict[str, Any]] = field(default_factory=list)
    elapsed: float = field(default=0.0, compare=False)
    """Seconds by the clock: of a run that was gone on with, those of all its parts."""

    @property
    def missing(self) -> list[str]:
        """Ids of the cases without a record, in their order."""
        done = {record["case"] for record in self.records}
        return [case for case in self.cases if case not in done]


def beginning(
    cases: Iterable[str],
    *,
    backend: str,
    device: str,
    seed: int,
    input_path: str = "",
    shard: str | None = None,
    selection: str = "",
    schedules: int = 0,
    sanitize: bool = False,
) -> Run:
    """A run of these cases on this machine, before its first record."""
    from narrowgauge.harness.records.environment import describe_run, source_hashes

    environment = describe_run(backend=backend, device=device, seed=seed, schedules=schedules, sanitize=sanitize)
    sources = source_hashes(backend, input_path)
    return Run(
        backend, device, seed, list(dict.fromkeys(cases)), environment, sources, shard, selection, schedules or 1,
        sanitize,
    )  # fmt: skip


def read(path: Path) -> Run:
    """The run whose report is in the folder `path`, or whose journal is the file `path`.

    A last line that was cut short is left out. Raises JournalError where there is no journal, or none of this version.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[Run, int]:
    """The run, and how many bytes of its journal are whole lines."""
    file = path / NAME if path.is_dir() else path
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        where = "the folder holds" if path.is_dir() else "there is"
        raise JournalError(f"{path}: {where} no {file.name}; a run writes it into its --report-dir") from error
    except OSError as error:
        raise JournalError(f"{file}: cannot be read: {error.strerror}") from error
    whole = content.rfind(b"\n") + 1
    lines = content[:whole].splitlines()
    if not lines:
        raise JournalError(f"{file}: holds no whole line, so no run; run it again without --resume")
    header = _parsed(lines[0], file, 1)
    versions = header.get("journal"), header.get("schema")
    if versions != (JOURNAL, SCHEMA):
        raise JournalError(
            f"{file}: is a journal of version {versions[0]} with records of schema {versions[1]}; this narrowgauge "
            f"reads version {JOURNAL} and schema {SCHEMA}: run the cases again"
        )
    names = {f.name for f in fields(Run)} - set(BEHIND)
    if names != set(header):
        wrong = ", ".join(sorted(names ^ set(header)))
        raise JournalError(f"{file}: line 1 is no header of a run: {wrong} missing or unknown")
    last: dict[str, dict[str, Any]] = {}
    elapsed = 0.0
    for number, line in enumerate(lines[1:], 2):
        found = _parsed(line, file, number)
        if set(found) == {"elapsed"} and isinstance(found["elapsed"], float):
            elapsed = found["elapsed"]
        elif "case" in found and "verdict" in found:
            last[found["case"]] = found
        else:
            raise JournalError(f"{file}: line {number} is no record: it has no case or no verdict")
    return Run(**header, records=list(last.values()), elapsed=elapsed), whole


def _parsed(line: bytes, file: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise JournalError(f"{file}: line {number} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise JournalError(f"{file}: line {number} is {type(found).__name__}, and not an object")
    return found


class Journal:
    """The journal of the run under way: opened at the first record, so that a run without one changes nothing.

    What stands there of an earlier run that is not gone on with is replaced, and the failures that it saved go with it.
    """

    def __init__(self, directory: Path, header: Callable[[], Run], *, clock: Callable[[], float] | None = None) -> None:
        """`header` is asked once, at the first record: what a machine is takes a while to say. `clock`: seconds since
        this process began with the run; those since now, where there is none."""
        self.path = directory / NAME
        self.kept: list[dict[str, Any]] = []
        """Records of an earlier run that this one goes on with."""
        started = time.monotonic()
        self._clock = clock or (lambda: time.monotonic() - started)
        self._before = self._said = 0.0
        self._header = header
        self._saved = {path: path.stat().st_mtime_ns for path in (directory / FAILURES).glob("*")}
        self._file: int | None = None
        self._size = 0

    @classmethod
    def resumed(cls, directory: Path, header: Run, *, clock: Callable[[], float] | None = None) -> Journal:
        """The journal in `directory`, to be gone on with; its records are `kept`, and its time goes on.

        Raises JournalError where there is none, or its run is not the one of `header`.
        """
        journal = cls(directory, lambda: header, clock=clock)
        run, journal._size = _read(journal.path)
        if differences := list(_differences(run, header)):
            raise JournalError(
                f"{journal.path}: is of another run: {'; '.join(differences)}. Run without --resume to begin anew, or "
                "with another --report-dir to keep both"
            )
        journal.kept = run.records
        journal._before = journal._said = run.elapsed
        return journal

    @property
    def elapsed(self) -> float:
        """Seconds that the run took so far, with those of the runs that this one goes on with."""
        return self._before + self._clock()

    def add(self, record: dict[str, Any]) -> None:
        """Write one record; it stays even if this process is killed. Raises JournalError where it cannot be written."""
        if self._file is None:
            self._open()
        self._write(record)
        if self.elapsed >= self._said + _PULSE:
            self._write_elapsed()

    def close(self) -> None:
        """Close the file; nothing is lost without, but the time since the last record."""
        if self._file is not None:
            if self._size:
                self._write_elapsed()
            os.close(self._file)
            self._file = None

    def _write_elapsed(self) -> None:
        self._said = self.elapsed
        with suppress(JournalError):  # where there is no room for it, the next record says so
            self._write({"elapsed": self._said})

    def _open(self) -> None:
        new = not self._size
        if new:
            self._remove_saved()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if new else 0), 0o666)
            os.ftruncate(self._file, self._size)  # a last line that was cut short
            os.lseek(self._file, self._size, os.SEEK_SET)
        except OSError as error:
            raise self._error(error) from error
        if new:
            try:
                self._write({name: value for name, value in asdict(self._header()).items() if name not in BEHIND})
            except JournalError:
                self.close()  # what comes next begins with the header again
                raise

    def _remove_saved(self) -> None:
        """Remove what the run before saved, but for what this one, or a person, has written anew."""
        with suppress(JournalError):  # of what is no journal, nothing is known
            named = {os.path.basename(record["saved"]) for record in read(self.path).records} if self._saved else set()
            for path, written in self._saved.items():
                with suppress(OSError):
                    if path.name in named and path.stat().st_mtime_ns == written:
                        path.unlink()
        self._saved = {}

    def _write(self, value: dict[str, Any]) -> None:
        assert self._file is not None
        line = memoryview(json.dumps(value).encode() + b"\n")
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
                os.lseek(self._file, self._size, os.SEEK_SET)
            raise self._error(error) from error
        self._size += written

    def _error(self, error: OSError) -> JournalError:
        return JournalError(
            f"{self.path}: cannot be written: {error.strerror}. The records before are in it: mend that and go on "
            "with --resume"
        )


def _differences(run: Run, now: Run) -> Iterable[str]:
    """What of a run is not as it is now, in words."""
    for name in ("backend", "device", "seed", "shard"):
        before, after = getattr(run, name), getattr(now, name)
        if before != after:
            yield f"{name} was {before}, and is {after}"
    for name in ("schedules", "sanitize"):
        before, after = getattr(run, name), getattr(now, name)
        if before != after:
            yield f"--{name} was {before}, and is {after}"
    for name in ("GPU", "kernel flags"):
        if (before := run.environment.get(name)) != (after := now.environment.get(name)):
            yield f"{name} was {before}, and is {after}"
    for name in sorted(run.sources | now.sources):
        if run.sources.get(name) != now.sources.get(name):
            yield f"the source of {name} has changed"
    before, after = set(run.cases), set(now.cases)
    for words, ids in (("selects no longer", before - after), ("selects besides", after - before)):
        if ids:
            yield f"this one {words} {len(ids)} case{'s' * (len(ids) > 1)}, the first {min(ids)}"
