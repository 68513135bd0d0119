"""The journal of a run: every record, written as soon as its case ends. An interrupted run loses only the running case.

The file is `records.jsonl` in the report folder. Its first line is a header: a JSON object with all fields of
`RecordedRun` except `NOT_IN_HEADER`. Each further line is a record (`Record.to_dict`), or `{"elapsed": …}`, the seconds
of the run so far. The last record of a case counts, and the last elapsed time. Numbers are written by Python: inf is
`Infinity`.
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

JOURNAL_VERSION = 2
"""Version of the header and of the elapsed lines. Raised with every change of them."""
JOURNAL_NAME = "records.jsonl"
FAILURES = "failures"
"""Folder of a report with the saved failures of its run (`harness.running.save_failures`)."""
NOT_IN_HEADER = ("records", "elapsed")
"""Fields of a run that the header does not contain."""
_ELAPSED_INTERVAL = 1.0
"""Seconds between two writes of the elapsed time: a killed run loses at most this much of it."""


class JournalError(Exception):
    """A journal cannot be read, written or continued. The message names the file, the reason and the remedy."""


@dataclass(frozen=True)
class RecordedRun:
    """A run, as recorded in its journal."""

    backend: str
    device: str
    seed: int
    cases: list[str]
    """Ids of all selected cases, with or without a record."""
    environment: dict[str, str]
    """Result of `harness.records.environment.describe_run`."""
    sources: dict[str, str]
    """Result of `harness.records.environment.source_hashes`: equal if the same code made the records."""
    shard: str | None = None
    """Shard of the matrix, "2/4". None: the whole matrix."""
    selection: str = ""
    """Digest of the cases of all shards (`harness.running.shard.digest`). Empty for a whole matrix."""
    schedules: int = 1
    """Number of seeded thread shuffles of each case."""
    sanitize: bool = False
    """Whether native kernels were built with sanitizers."""
    journal: int = JOURNAL_VERSION
    schema: int = SCHEMA
    """Version of the records: `harness.records.record.SCHEMA`."""
    records: list[dict[str, Any]] = field(default_factory=list)
    elapsed: float = field(default=0.0, compare=False)
    """Wall-clock seconds, summed over all parts of a resumed run."""

    @property
    def missing(self) -> list[str]:
        """Ids of the cases without a record, in order."""
        recorded = {record["case"] for record in self.records}
        return [case for case in self.cases if case not in recorded]


def new_run(
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
) -> RecordedRun:
    """A run of these cases on this machine, without records."""
    from narrowgauge.harness.records.environment import describe_run, source_hashes

    environment = describe_run(backend=backend, device=device, seed=seed, schedules=schedules, sanitize=sanitize)
    sources = source_hashes(backend, input_path)
    return RecordedRun(
        backend, device, seed, list(dict.fromkeys(cases)), environment, sources, shard, selection, schedules or 1,
        sanitize,
    )  # fmt: skip


def read(path: Path) -> RecordedRun:
    """The run in the report folder `path`, or in the journal file `path`.

    A truncated last line is ignored. Raises JournalError if there is no journal, or a journal of another version.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[RecordedRun, int]:
    """The run, and the number of bytes in complete lines of its journal."""
    file = path / JOURNAL_NAME if path.is_dir() else path
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        location = "the folder holds" if path.is_dir() else "there is"
        raise JournalError(f"{path}: {location} no {file.name}; a run writes it into its --report-dir") from error
    except OSError as error:
        raise JournalError(f"{file}: cannot be read: {error.strerror}") from error
    whole_lines = content.rfind(b"\n") + 1
    lines = content[:whole_lines].splitlines()
    if not lines:
        raise JournalError(f"{file}: holds no whole line, so no run; run it again without --resume")
    header = _parse_line(lines[0], file, 1)
    versions = header.get("journal"), header.get("schema")
    if versions != (JOURNAL_VERSION, SCHEMA):
        raise JournalError(
            f"{file}: is a journal of version {versions[0]} with records of schema {versions[1]}; this narrowgauge "
            f"reads version {JOURNAL_VERSION} and schema {SCHEMA}: run the cases again"
        )
    names = {f.name for f in fields(RecordedRun)} - set(NOT_IN_HEADER)
    if names != set(header):
        keys = ", ".join(sorted(names ^ set(header)))
        raise JournalError(f"{file}: line 1 is no header of a run: {keys} missing or unknown")
    latest: dict[str, dict[str, Any]] = {}
    elapsed = 0.0
    for number, line in enumerate(lines[1:], 2):
        entry = _parse_line(line, file, number)
        if set(entry) == {"elapsed"} and isinstance(entry["elapsed"], float):
            elapsed = entry["elapsed"]
        elif "case" in entry and "verdict" in entry:
            latest[entry["case"]] = entry
        else:
            raise JournalError(f"{file}: line {number} is no record: it has no case or no verdict")
    return RecordedRun(**header, records=list(latest.values()), elapsed=elapsed), whole_lines


def _parse_line(line: bytes, file: Path, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise JournalError(f"{file}: line {number} is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise JournalError(f"{file}: line {number} is {type(entry).__name__}, and not an object")
    return entry


class Journal:
    """Journal of the running run. The file is opened at the first record, so a run without records changes nothing.

    An earlier journal in the folder is replaced unless it is resumed; the failures saved by its run are removed with
    it.
    """

    def __init__(
        self, directory: Path, header: Callable[[], RecordedRun], *, clock: Callable[[], float] | None = None
    ) -> None:
        """`header` is called once, at the first record: describing the machine takes time. `clock`: seconds since this
        process began with the run; by default the seconds since this call."""
        self.path = directory / JOURNAL_NAME
        self.earlier_records: list[dict[str, Any]] = []
        """Records of the resumed run."""
        started = time.monotonic()
        self._clock = clock or (lambda: time.monotonic() - started)
        self._before = self._written_elapsed = 0.0
        self._header = header
        self._saved = {path: path.stat().st_mtime_ns for path in (directory / FAILURES).glob("*")}
        self._file: int | None = None
        self._size = 0

    @classmethod
    def resumed(cls, directory: Path, header: RecordedRun, *, clock: Callable[[], float] | None = None) -> Journal:
        """Resume the journal in `directory`: its records are `earlier_records`, and its elapsed time continues.

        Raises JournalError if there is no journal, or if its run differs from `header`.
        """
        journal = cls(directory, lambda: header, clock=clock)
        run, journal._size = _read(journal.path)
        if differences := list(_differences(run, header)):
            raise JournalError(
                f"{journal.path}: is of another run: {'; '.join(differences)}. Run without --resume to begin anew, or "
                "with another --report-dir to keep both"
            )
        journal.earlier_records = run.records
        journal._before = journal._written_elapsed = run.elapsed
        return journal

    @property
    def elapsed(self) -> float:
        """Seconds of the run so far, including the runs that it resumes."""
        return self._before + self._clock()

    def add(self, record: dict[str, Any]) -> None:
        """Write a record. It survives a kill of this process. Raises JournalError if it cannot be written."""
        if self._file is None:
            self._open()
        self._write(record)
        if self.elapsed >= self._written_elapsed + _ELAPSED_INTERVAL:
            self._write_elapsed()

    def close(self) -> None:
        """Close the file and write the elapsed time."""
        if self._file is not None:
            if self._size:
                self._write_elapsed()
            os.close(self._file)
            self._file = None

    def _write_elapsed(self) -> None:
        self._written_elapsed = self.elapsed
        with suppress(JournalError):  # if the disk is full, the next record raises
            self._write({"elapsed": self._written_elapsed})

    def _open(self) -> None:
        new = not self._size
        if new:
            self._remove_saved()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if new else 0), 0o666)
            os.ftruncate(self._file, self._size)  # remove a truncated last line
            os.lseek(self._file, self._size, os.SEEK_SET)
        except OSError as error:
            raise self._error(error) from error
        if new:
            try:
                self._write(
                    {name: value for name, value in asdict(self._header()).items() if name not in NOT_IN_HEADER}
                )
            except JournalError:
                self.close()  # the next record writes the header again
                raise

    def _remove_saved(self) -> None:
        """Remove the saved failures of the earlier run, except files that were written again since."""
        with suppress(JournalError):  # the saved failures of an unreadable journal are unknown
            saved_names = (
                {os.path.basename(record["saved"]) for record in read(self.path).records} if self._saved else set()
            )
            for path, written in self._saved.items():
                with suppress(OSError):
                    if path.name in saved_names and path.stat().st_mtime_ns == written:
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


def _differences(run: RecordedRun, current: RecordedRun) -> Iterable[str]:
    """Differences between a recorded run and the current run, as sentences."""
    for name in ("backend", "device", "seed", "shard"):
        old, new = getattr(run, name), getattr(current, name)
        if old != new:
            yield f"{name} was {old}, and is {new}"
    for name in ("schedules", "sanitize"):
        old, new = getattr(run, name), getattr(current, name)
        if old != new:
            yield f"--{name} was {old}, and is {new}"
    for name in ("GPU", "kernel flags"):
        if (old := run.environment.get(name)) != (new := current.environment.get(name)):
            yield f"{name} was {old}, and is {new}"
    for name in sorted(run.sources | current.sources):
        if run.sources.get(name) != current.sources.get(name):
            yield f"the source of {name} has changed"
    old, new = set(run.cases), set(current.cases)
    for verb, ids in (("selects no longer", old - new), ("selects besides", new - old)):
        if ids:
            yield f"this one {verb} {len(ids)} case{'s' * (len(ids) > 1)}, the first {min(ids)}"
