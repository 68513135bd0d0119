"""The journal of a run: every record, written as soon as its case ends. An interrupted run loses only the running case.

The file is `records.jsonl` in the report folder. Its first line is a header: a JSON object with all fields of
`RecordedRun` except `NOT_IN_HEADER`. Each further line is a record (`Record.to_dict`), or `{"elapsed": …}`, the seconds
of the run so far, or `{"loaded": …, "unverified": …}`, the sources that the backend has loaded so far. The last record
of a case counts, and the last line of another kind. Numbers are written by Python: inf is
`Infinity`. While a process writes the journal, it holds the lock of the folder (`harness.records.folder_lock`).
"""

from __future__ import annotations

import gc
import json
import os
import stat
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.harness.machine.collection import paused_collection
from narrowgauge.harness.machine.plain_text import plain_text
from narrowgauge.harness.records.folder_lock import FolderInUseError, lock_folder, unlock_folder
from narrowgauge.harness.records.loaded_sources import LoadedSources, differences
from narrowgauge.harness.records.record import SCHEMA, Record

JOURNAL_VERSION = 3
"""Version of the header and of the lines that are no records. Raised with every change."""
JOURNAL_NAME = "records.jsonl"
FOREIGN_NAME = "records.foreign.jsonl"
"""Name for a foreign file found in place of the journal of a running run."""
FAILURES = "failures"
"""Folder of a report with the saved failures of its run (`harness.running.save_failures`)."""
NOT_IN_HEADER = ("records", "elapsed", "loaded", "unverified")
"""Fields of a run outside of the header."""
LISTED = 20
"""Largest number of problems in a message, which counts all of them."""
_ELAPSED_INTERVAL = 1.0
"""Seconds between two writes of the elapsed time: a killed run loses at most this much time."""
_LOADED = {"loaded", "unverified"}
"""Keys of a line with sources."""
_LINE = 1 << 26
"""Largest length of a line in bytes. The longest lines are headers, about 100 bytes per case."""


class JournalError(Exception):
    """A journal cannot be read, written or continued. The message names the file, the reason and the remedy."""


class UntrustedRunError(JournalError):
    """A run contradicts itself, or was made by different sources. The message names cases, columns and the remedy."""

    def __init__(self, path: Path, problems: list[str], command: str = "") -> None:
        """`command`: that of the run, for the message."""
        lines = [f"  {problem}" for problem in problems[:LISTED]]
        if len(problems) > LISTED:
            lines.append(f"  … and {len(problems) - LISTED} more")
        listed = "\n".join(lines)
        following = f"\nnext: {command}" if command else ""
        super().__init__(f"{path}: the run cannot be trusted; run its cases again:\n{listed}{following}")


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
    command: str = ""
    """The command that runs the cases again, for messages. Empty: unknown."""
    journal: int = JOURNAL_VERSION
    schema: int = SCHEMA
    """Version of the records: `harness.records.record.SCHEMA`."""
    records: list[dict[str, Any]] = field(default_factory=list)
    elapsed: float = field(default=0.0, compare=False)
    """Wall-clock seconds, summed over all parts of a resumed run."""
    loaded: dict[str, str] = field(default_factory=dict, compare=False)
    """Files, packages and variables of a user's backend (`harness.records.loaded_sources`)."""
    unverified: dict[str, str] = field(default_factory=dict, compare=False)
    """Reasons by the names of sources without a later comparison."""

    @property
    def missing(self) -> list[str]:
        """Ids of the cases without a record, in order."""
        recorded = {record["case"] for record in self.records}
        return [case for case in self.cases if case not in recorded]


class Lines(NamedTuple):
    """The complete lines of a journal."""

    size: int
    """Number of bytes."""
    records: int
    """Number of lines with a record."""
    elapsed: list[float]
    """Value of each line of elapsed time."""


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
    command: str = "",
) -> RecordedRun:
    """A run of these cases on this machine, without records."""
    from narrowgauge.harness.records.environment import describe_run, source_hashes

    environment = describe_run(backend=backend, device=device, seed=seed, schedules=schedules, sanitize=sanitize)
    sources = source_hashes(backend, input_path)
    return RecordedRun(
        backend, device, seed, list(dict.fromkeys(cases)), environment, sources, shard, selection, schedules or 1,
        sanitize, command,
    )  # fmt: skip


def read(path: Path) -> RecordedRun:
    """The run in the report folder `path`, or in the journal file `path`. Its text is escaped (`plain_text`).

    A truncated last line is ignored. Raises JournalError if there is no journal, a journal of another version, or a
    line that is no record; UntrustedRunError if a record contradicts itself (`harness.records.record_check`).
    """
    return read_with_lines(path)[0]


@paused_collection()
def read_with_lines(path: Path) -> tuple[RecordedRun, Lines]:
    """The run as of `read`, and the lines of its journal. Raises as `read` does."""
    from narrowgauge.harness.records.json_line import parse_record, share_words
    from narrowgauge.harness.records.record_check import contradictions, has_record_type, record_problems
    from narrowgauge.harness.records.typed import type_problem

    file = path / JOURNAL_NAME if path.is_dir() else path
    lines = _lines(path, file)
    first, size = next(lines, (b"", 0))
    if not size:
        raise JournalError(f"{file}: holds no whole line, so no run; run it again without --resume")
    header = _parse_line(first, file, 1)
    versions = header.get("journal"), header.get("schema")
    if versions != (JOURNAL_VERSION, SCHEMA):
        raise JournalError(
            f"{file}: is a journal of version {versions[0]} with records of schema {versions[1]}; this narrowgauge "
            f"reads version {JOURNAL_VERSION} and schema {SCHEMA}: run the cases again"
        )
    if problem := type_problem(header, _line_type("Header")):
        raise JournalError(f"{file}: line 1 is no header of a run: {problem}")
    latest: dict[str, dict[str, Any]] = {}
    contradicting: dict[str, list[str]] = {}
    elapsed: list[float] = []
    count, sources = 0, LoadedSources()
    for number, (line, end) in enumerate(lines, 2):
        size = end
        entry = parse_record(line)
        complete = entry is not None
        if entry is None:
            entry = _parse_line(line, file, number)
            complete = has_record_type(entry)
        if complete:
            share_words(entry)
        elif set(entry) == {"elapsed"} and isinstance(entry["elapsed"], float):
            elapsed.append(entry["elapsed"])
            continue
        elif set(entry) == _LOADED and not type_problem(entry, _line_type("Loaded")):
            sources = LoadedSources(entry["loaded"], entry["unverified"])
            continue
        elif problem := type_problem(entry, _line_type("Record"), "column"):
            raise JournalError(f"{file}: line {number} is no record: {problem}")
        count += 1
        latest[entry["case"]] = entry
        contradicting[entry["case"]] = contradictions(entry) if complete else record_problems(entry)
    records = list(latest.values())
    seconds = elapsed[-1] if elapsed else 0.0
    run = RecordedRun(
        **header, records=records, elapsed=seconds, loaded=sources.entries, unverified=sources.unverified
    )  # fmt: skip
    gc.freeze()  # records stay until the process ends: no collection needs to look at their millions of objects
    if problems := [f"record {case!a}: {problem}" for case, found in contradicting.items() for problem in found]:
        raise UntrustedRunError(path, problems, run.command)
    return run, Lines(size, count, elapsed)


def _lines(path: Path, file: Path) -> Iterator[tuple[bytes, int]]:
    """The complete lines of a journal, each with the number of bytes up to its end."""
    try:
        # O_NONBLOCK: a named pipe would wait for its writer.
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise JournalError(f"{file}: is no regular file; name the --report-dir of a run, or its {JOURNAL_NAME}")
            size = number = 0
            while (line := opened.readline(_LINE + 1)).endswith(b"\n"):
                size, number = size + len(line), number + 1
                yield line, size
            if len(line) > _LINE:
                raise JournalError(f"{file}: line {number + 1} is longer than {_LINE} bytes, so no line of a run")
    except FileNotFoundError as error:
        location = "the folder holds" if path.is_dir() else "there is"
        raise JournalError(f"{path}: {location} no {file.name}; a run writes it into its --report-dir") from error
    except OSError as error:
        raise JournalError(f"{file}: cannot be read: {error.strerror}") from error


def _parse_line(line: bytes, file: Path, number: int) -> dict[str, Any]:
    from narrowgauge.harness.records.json_line import parse_line

    try:
        entry = parse_line(line)
    except RecursionError as error:
        raise JournalError(f"{file}: line {number} is nested too deep, so no line of a run") from error
    except ValueError as error:
        raise JournalError(f"{file}: line {number} is not JSON: {plain_text(str(error))}") from error
    if not isinstance(entry, dict):
        raise JournalError(f"{file}: line {number} is {type(entry).__name__}, and not an object")
    return entry


@cache
def _line_type(kind: str) -> type:
    """The type of a line: `Header`, `Loaded`, or `Record`, which may lack all columns but case and verdict."""
    from narrowgauge.harness.records.typed import object_type, types_of

    if kind == "Record":
        types = types_of(Record)
        return object_type(kind, types, optional=types.keys() - {"case", "verdict"}, unknown=True)
    types = types_of(RecordedRun)
    names = _LOADED if kind == "Loaded" else types.keys() - NOT_IN_HEADER
    return object_type(kind, {name: types[name] for name in sorted(names)})


class Journal:
    """Journal of the running run. The file is opened at the first record: a run without records changes no file.

    The journal holds the lock of its folder until `close`: another process cannot write a journal or a report into the
    folder. An earlier journal in the folder is replaced unless it is resumed; the failures saved by its run are removed
    with it. If a foreign program deletes, replaces or changes the file, the next record writes the file again with all
    records.
    """

    def __init__(
        self, directory: Path, header: Callable[[], RecordedRun], *, clock: Callable[[], float] | None = None
    ) -> None:
        """`header` is called once, at the first record: describing the machine takes time. `clock`: seconds since this
        process began with the run; by default the seconds since this call.

        Raises JournalError if another process writes into the folder, or if the folder cannot be written.
        """
        self.path = directory / JOURNAL_NAME
        self.earlier_records: list[dict[str, Any]] = []
        """Records of the resumed run."""
        started = time.monotonic()
        self._clock = clock or (lambda: time.monotonic() - started)
        self._before = self._written_elapsed = 0.0
        self._header = header
        self._header_line: dict[str, Any] | None = None
        self._records: list[dict[str, Any]] = []
        """Records in the file."""
        self.sources = LoadedSources()
        """Sources that the backend has loaded."""
        self._written_sources: dict[str, Any] = {}
        self._file: int | None = None
        self._size = self._changed = 0
        """Size of the file, and the time of the last change by this process. No program can set that time back."""
        self._notice = ""
        """Warning about a rewritten file."""
        self._taken = ""
        """Reason against further writing: a second process uses the folder, which was deleted with the lock."""
        self._locked = False
        self._lock()
        self._saved = {path: path.stat().st_mtime_ns for path in (directory / FAILURES).glob("*")}

    @classmethod
    def resumed(cls, directory: Path, header: RecordedRun, *, clock: Callable[[], float] | None = None) -> Journal:
        """Resume the journal in `directory`: its records are `earlier_records`, and its elapsed time continues.

        Raises JournalError if there is no journal, if its run differs from `header` or contradicts itself, or if
        another process writes into the folder.
        """
        journal = cls(directory, lambda: header, clock=clock)
        try:
            run, lines = read_with_lines(journal.path)
            journal._size = lines.size
            if differences := list(_differences(run, header)):
                raise JournalError(
                    f"{journal.path}: is of another run: {'; '.join(differences)}. Run without --resume to begin anew, "
                    "or with another --report-dir to keep both"
                )
        except JournalError:
            journal.close()
            raise
        journal.earlier_records = run.records
        journal._records = list(run.records)
        journal.sources = LoadedSources(dict(run.loaded), dict(run.unverified))
        journal._written_sources = journal._sources_entry()
        journal._before = journal._written_elapsed = run.elapsed
        return journal

    @property
    def elapsed(self) -> float:
        """Seconds of the run so far, including the resumed runs."""
        return self._before + self._clock()

    def add(self, record: dict[str, Any]) -> None:
        """Write a record. It survives a kill of this process. Raises JournalError if it cannot be written."""
        if self._taken:
            raise JournalError(self._taken)
        if self._file is None:
            self._open()
        self._write_sources()
        self._write(record)
        self._records.append(record)
        if self.elapsed >= self._written_elapsed + _ELAPSED_INTERVAL:
            self._write_elapsed()
        self._warn()

    def close(self) -> None:
        """Write the elapsed time, close the file, and end the lock of the folder."""
        if self._file is not None and self._size and not self._taken:
            with suppress(JournalError):  # as in `_write_elapsed`
                self._write_sources()
            self._write_elapsed()
        self._close_file()
        if self._locked:
            self._locked = False
            unlock_folder(self.path.parent)
        self._warn()

    def _warn(self) -> None:
        """Issue the warning about a restored file: last, because a filter can turn a warning into an exception."""
        notice, self._notice = self._notice, ""
        if notice:
            warnings.warn(notice, RuntimeWarning, stacklevel=3)

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _lock(self) -> None:
        try:
            lock_folder(self.path.parent)
        except OSError as error:
            if isinstance(error, FolderInUseError):
                raise JournalError(error.strerror) from error
            folder = self.path.parent
            reason = (
                "is no folder" if folder.exists() and not folder.is_dir() else f"cannot be written: {error.strerror}"
            )
            raise JournalError(f"{folder}: {reason}; give another --report-dir") from error
        self._locked = True

    def _sources_entry(self) -> dict[str, Any]:
        return {"loaded": dict(self.sources.entries), "unverified": dict(self.sources.unverified)}

    def _write_sources(self) -> None:
        """Write the sources loaded by the backend, if changed."""
        entry = self._sources_entry()
        if entry != (self._written_sources or {"loaded": {}, "unverified": {}}):
            self._write(entry)
            self._written_sources = entry

    def _write_elapsed(self) -> None:
        self._written_elapsed = self.elapsed
        with suppress(JournalError):  # if the disk is full, the next record raises
            self._write({"elapsed": self._written_elapsed})

    def _open(self) -> None:
        new = not self._size
        if not self._locked:
            self._lock()
        if new:
            self._remove_saved()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # O_APPEND: no write leaves a gap, even if a foreign program makes the file shorter.
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            if os.fstat(self._file).st_size < self._size:  # since the journal was read for --resume
                self._restore("changed")
            os.ftruncate(self._file, self._size)  # remove a truncated last line
            self._changed = os.fstat(self._file).st_ctime_ns
        except OSError as error:
            self._close_file()
            raise self._error(error) from error
        if new:
            try:
                self._write(self._header_entry())
            except JournalError:
                self._close_file()  # the next record writes the header again
                raise

    def _header_entry(self) -> dict[str, Any]:
        if self._header_line is None:
            values = asdict(self._header())
            self._header_line = {name: value for name, value in values.items() if name not in NOT_IN_HEADER}
        return self._header_line

    def _change(self) -> str:
        """The change of the file by a foreign program, or the empty string."""
        assert self._file is not None
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return "deleted"
        if not os.path.samestat(found, os.fstat(self._file)):
            return "replaced"
        return "changed" if (found.st_size, found.st_ctime_ns) != (self._size, self._changed) else ""

    def _restore(self, change: str) -> None:
        """Write the file again, with all records so far. A foreign file is kept as `FOREIGN_NAME`."""
        assert self._file is not None
        lock_folder(self.path.parent)  # the lock was deleted with the folder
        unlock_folder(self.path.parent)
        sources = [self._written_sources] if self._written_sources else []
        lines = [self._header_entry(), *sources, *self._records, {"elapsed": self._written_elapsed}]
        content = memoryview(b"".join(map(_line, lines)))
        new = self.path.with_name(f".{JOURNAL_NAME}.new")
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            written = 0
            while written < len(content):
                written += os.write(file, content[written:])
            note = ""
            if change != "deleted":
                foreign = self.path.with_name(FOREIGN_NAME)
                os.replace(self.path, foreign)
                note = f"; the other content is in {foreign}"
            os.replace(new, self.path)
        except OSError:
            os.close(file)
            new.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file, self._size = file, len(content)
        self._changed = os.fstat(file).st_ctime_ns
        self._notice = (
            f"{self.path}: another program has {change} this journal of a running run; it is written again with all "
            f"earlier records ({len(self._records)}){note}"
        )

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
        line = memoryview(_line(value))
        written = 0
        try:
            if change := self._change():
                self._restore(change)
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            with suppress(OSError):
                if not self._change() or written:
                    os.ftruncate(self._file, self._size)
                    self._changed = os.fstat(self._file).st_ctime_ns
            raise self._error(error) from error
        self._size += written
        self._changed = os.fstat(self._file).st_ctime_ns

    def _error(self, error: OSError) -> JournalError:
        if isinstance(error, FolderInUseError):
            self._taken = str(error.strerror)
            return JournalError(self._taken)
        return JournalError(
            f"{self.path}: cannot be written: {error.strerror}. The records before are in it: mend that and go on "
            "with --resume"
        )


def _line(value: dict[str, Any]) -> bytes:
    from narrowgauge.harness.records.json_line import record_json

    text = record_json(value) if "stages" in value and "findings" in value else json.dumps(value)
    return text.encode() + b"\n"


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
    yield from differences(run.loaded)[0]
    old, new = set(run.cases), set(current.cases)
    for verb, ids in (("selects no longer", old - new), ("selects besides", new - old)):
        if ids:
            yield f"this one {verb} {len(ids)} case{'s' * (len(ids) > 1)}, the first {min(ids)}"
