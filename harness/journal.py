"""The journal of a run: every record, written as it comes. Whatever ends the run costs the case under way alone.

`records.jsonl` in the folder of a report. Its first line is a header, a JSON object of the fields of `Run` but the
records; each line behind it is a record (`Record.to_dict`), and of a case the last one counts. Numbers are as Python
writes them: inf is `Infinity`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from harness.record import SCHEMA

JOURNAL = 1
"""Version of the header. A change of its fields changes it."""
NAME = "records.jsonl"


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
    """What `harness.environment.describe_run` says."""
    sources: dict[str, str]
    """What `harness.environment.source_hashes` says: equal where the same code made the records."""
    shard: str | None = None
    """Which part of a matrix the cases are, "2/4"; None where they are the whole."""
    selection: str = ""
    """Of the cases of all shards: what `harness.shard.digest` says; nothing where the cases are the whole."""
    journal: int = JOURNAL
    schema: int = SCHEMA
    """Of the records: `harness.record.SCHEMA`."""
    records: list[dict[str, Any]] = field(default_factory=list)

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
    from harness.environment import describe_run, source_hashes

    environment = describe_run(backend=backend, device=device, seed=seed, schedules=schedules, sanitize=sanitize)
    sources = source_hashes(backend, input_path)
    return Run(backend, device, seed, list(dict.fromkeys(cases)), environment, sources, shard, selection)


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
    names = {f.name for f in fields(Run)} - {"records"}
    if names != set(header):
        wrong = ", ".join(sorted(names ^ set(header)))
        raise JournalError(f"{file}: line 1 is no header of a run: {wrong} missing or unknown")
    records = [_parsed(line, file, number) for number, line in enumerate(lines[1:], 2)]
    for number, record in enumerate(records, 2):
        if "case" not in record or "verdict" not in record:
            raise JournalError(f"{file}: line {number} is no record: it has no case or no verdict")
    last = {record["case"]: record for record in records}
    return Run(**header, records=list(last.values())), whole


def _parsed(line: bytes, file: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise JournalError(f"{file}: line {number} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise JournalError(f"{file}: line {number} is {type(found).__name__}, and not an object")
    return found


class Journal:
    """The journal of the run under way: opened at the first record, so that a run without one changes nothing."""

    def __init__(self, directory: Path, header: Callable[[], Run]) -> None:
        """`header` is asked once, at the first record: what a machine is takes a while to say."""
        self.path = directory / NAME
        self.kept: list[dict[str, Any]] = []
        """Records of an earlier run that this one goes on with."""
        self._header = header
        self._file: int | None = None
        self._size = 0

    @classmethod
    def resumed(cls, directory: Path, header: Run) -> Journal:
        """The journal in `directory`, to be gone on with; its records are `kept`.

        Raises JournalError where there is none, or its run is not the one of `header`.
        """
        journal = cls(directory, lambda: header)
        run, journal._size = _read(journal.path)
        if differences := list(_differences(run, header)):
            raise JournalError(
                f"{journal.path}: is of another run: {'; '.join(differences)}. Run without --resume to begin anew, or "
                "with another --report-dir to keep both"
            )
        journal.kept = run.records
        return journal

    def add(self, record: dict[str, Any]) -> None:
        """Write one record; it stays even if this process is killed. Raises JournalError where it cannot be written."""
        if self._file is None:
            self._open()
        self._write(record)

    def close(self) -> None:
        """Close the file; nothing is lost without."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> None:
        new = not self._size
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if new else 0), 0o666)
            os.ftruncate(self._file, self._size)  # a last line that was cut short
            os.lseek(self._file, self._size, os.SEEK_SET)
        except OSError as error:
            raise self._error(error) from error
        if new:
            try:
                self._write({name: value for name, value in asdict(self._header()).items() if name != "records"})
            except JournalError:
                self.close()  # what comes next begins with the header again
                raise

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
