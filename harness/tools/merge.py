"""Merging the journals of the shards of a run into the journal of the whole run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from narrowgauge.harness.gate.baseline_notes import add_baseline_notes
from narrowgauge.harness.records.journal import FAILURES, Journal, JournalError, RecordedRun, read
from narrowgauge.harness.records.loaded_sources import LoadedSources
from narrowgauge.harness.records.record import succeeded
from narrowgauge.harness.report import github
from narrowgauge.harness.report.report import write
from narrowgauge.harness.report.text import duration, plural
from narrowgauge.harness.running.shard import Shard, ShardError, digest

_OF_A_SHARD = re.compile("--(ng-)?(shard|durations|report-dir)")
"""Options of a command that differ between the shards of a run."""
NAMED = 5
"""Largest number of shards or cases named in a message, which counts all of them."""
SETTINGS: dict[str, Callable[[RecordedRun], Any]] = {
    "backend": lambda run: run.backend, "device": lambda run: run.device, "seed": lambda run: run.seed,
    "--schedules": lambda run: run.schedules, "--sanitize": lambda run: run.sanitize,
    **{
        name: lambda run, name=name: run.environment.get(name)  # type: ignore[misc]
        for name in ("GPU", "commit", "kernel flags", "kernel sources")
    },
}  # fmt: skip
"""Settings that are equal in all shards of a run, by their names in messages."""


class MergeError(Exception):
    """Journals are not all shards of one run. The message names the journals, the reason and the remedy."""


def merge(folders: Sequence[Path]) -> RecordedRun:
    """The run of these shards, given as report folders or journal files. Records are sorted by id.

    A fact of the environment different between shards lists the shards by value. The elapsed time is that of
    the longest shard. Raises MergeError unless the journals are all shards of the same run, without repetition and
    complete; JournalError if a journal cannot be read.
    """
    shards = sorted(((_shard(folder, run), folder, run) for folder in folders for run in [read(folder)]), key=_number)
    counts = {shard.count: folder for shard, folder, _ in shards}
    if len(counts) > 1:
        counts_text = ", ".join(f"{folder} is one of {count}" for count, folder in sorted(counts.items()))
        raise MergeError(f"shards of different numbers of shards: {counts_text}")
    for (shard, folder, _), (following, second_folder, _) in pairwise(shards):
        if shard == following:
            raise MergeError(f"shard {shard} is given twice: {folder} and {second_folder}")
    (_, first, run), *others = shards
    for _, folder, other_run in others:
        _check_same_run(first, run, folder, other_run)
    _check_complete(shards)
    return replace(
        run, shard=None, selection="", cases=sorted(case for _, _, part in shards for case in part.cases),
        environment=_environment([(shard, part.environment) for shard, _, part in shards]),
        elapsed=max(part.elapsed for _, _, part in shards), command=_undivided(run.command),
        loaded={key: entry for _, _, part in shards for key, entry in part.loaded.items()},
        unverified={name: reason for _, _, part in shards for name, reason in part.unverified.items()},
        records=sorted((record for _, _, part in shards for record in part.records), key=lambda r: str(r["case"])),
    )  # fmt: skip


def merge_session(folders: Sequence[Path], directory: Path, *, link: str = "", history: bool = True) -> bool:
    """Merge the shards in these folders into a report in `directory`, and print the summary. True if the run succeeded.

    `link`: address at the end of the report's summary. `history`: append the run to the history
    (`harness.records.history`). Raises MergeError and JournalError as `merge` does, and MergeError if
    `directory` cannot be written.
    """
    from rich.console import Console

    from narrowgauge.harness.records.history import path_beside, update
    from narrowgauge.harness.report.terminal import print_text
    from narrowgauge.harness.tools.run_cases import print_result

    console, link = Console(), link or github.run_link()
    run = collect_failures(merge(folders), folders, directory)
    of_cases = sum(record.get("seconds_total") or 0.0 for record in run.records)
    time_text = f"{duration(run.elapsed)}, that of the longest shard; all cases together {duration(of_cases)}"
    environment = run.environment | {"time": time_text}
    add_baseline_notes(run.records, environment)
    warning, past = update(run, path_beside(directory), complete=True) if history else ("", [])
    try:
        page = write(run.records, environment, directory, elapsed=run.elapsed, link=link, past=past)
    except OSError as error:
        raise MergeError(f"{directory}: cannot be written: {error}") from error
    print_result(run.records, console)
    if warning:
        print_text(warning, console, "yellow")
    summary = f"{len(run.records)} cases of {plural(len(folders), 'shard')} in {time_text}; report: {page}"
    console.print(summary, markup=False, soft_wrap=True)
    github.publish(run.records, environment, run.elapsed, link=link, print_line=print)
    return succeeded(run.records)


def _undivided(command: str) -> str:
    """The command of a whole run, from that of a shard."""
    words: list[str] = []
    for word in shlex.split(command):
        if _OF_A_SHARD.fullmatch(words[-1] if words else ""):
            words.pop()  # the option of this value
        elif not _OF_A_SHARD.fullmatch(word.partition("=")[0]) or "=" not in word:
            words.append(word)
    return shlex.join(words)


def _number(entry: tuple[Shard, Path, RecordedRun]) -> int:
    return entry[0].number


def _shard(folder: Path, run: RecordedRun) -> Shard:
    if run.shard is None:
        raise MergeError(f"{folder}: is a whole run, and no shard of one")
    try:
        return Shard.parse(run.shard)
    except ShardError as error:
        raise MergeError(f"{folder}: its journal says {error}") from error


def _check_same_run(first: Path, run: RecordedRun, folder: Path, other_run: RecordedRun) -> None:
    for name, get in SETTINGS.items():
        if get(run) != get(other_run):
            raise MergeError(f"shards of different runs: {name} is {get(run)} in {first}, {get(other_run)} in {folder}")
    for name in sorted(run.sources | other_run.sources):
        if run.sources.get(name) != other_run.sources.get(name):
            raise MergeError(f"shards of different runs: the source of {name} is not the same in {first} and {folder}")
    for key in sorted(run.loaded.keys() & other_run.loaded.keys()):
        if run.loaded[key] != other_run.loaded[key]:
            raise MergeError(f"shards of different runs: {key} is not the same in {first} and {folder}")
    if run.selection != other_run.selection:
        raise MergeError(
            f"shards of different runs: {first} and {folder} select different cases; run every shard with the same "
            "case files, tier and keywords"
        )


def _check_complete(shards: Sequence[tuple[Shard, Path, RecordedRun]]) -> None:
    """Raise MergeError if a shard, a case or a record is missing."""
    count = shards[0][0].count
    present = {shard.number for shard, _, _ in shards}
    if missing := [f"{number}/{count}" for number in range(1, count + 1) if number not in present]:
        raise MergeError(f"{len(missing)} of {count} shards are missing: {_name_list(missing)}")
    places: dict[str, Path] = {}
    for _, folder, run in shards:
        for case in run.cases:
            if places.setdefault(case, folder) != folder:
                raise MergeError(
                    f"{case} is in {places[case]} and in {folder}: the shards were divided by different durations; run "
                    "every shard with the same --durations, or each without"
                )
    if digest(places) != shards[0][2].selection:
        raise MergeError(
            f"cases are in none of the {count} shards: these were divided by different durations; run every shard with "
            "the same --durations, or each without"
        )
    for shard, folder, run in shards:
        if run.missing:
            raise MergeError(
                f"{folder}: shard {shard} was interrupted: {len(run.missing)} of {len(run.cases)} cases have no "
                f"record: {_name_list(run.missing)}; go on with --resume"
            )


def _name_list(names: Sequence[str]) -> str:
    omitted = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + omitted


def _environment(environments: Iterable[tuple[Shard, dict[str, str]]]) -> dict[str, str]:
    """Facts of all shards. A differing fact lists its values with their shards."""
    facts: dict[str, dict[str, list[int]]] = {}
    for shard, environment in environments:
        for name, value in environment.items():
            facts.setdefault(name, {}).setdefault(value, []).append(shard.number)
    merged = {}
    for name, values in facts.items():
        texts = (f"{value} (shard {', '.join(map(str, numbers))})" for value, numbers in values.items())
        merged[name] = next(iter(values)) if len(values) == 1 else "; ".join(texts)
    return merged


def collect_failures(run: RecordedRun, folders: Iterable[Path], directory: Path) -> RecordedRun:
    """Copy the saved failures of the shards into `directory`, and write the run's journal into it.

    A missing saved failure is noted in its record. Raises MergeError if `directory` is a shard's folder, or if a
    failure cannot be copied.
    """
    reports = [folder if folder.is_dir() else folder.parent for folder in folders]
    for folder in reports:
        if folder.resolve() == directory.resolve():
            raise MergeError(f"--report-dir is {directory}, which is a shard's: it would be replaced; name another one")
    saved = {path.name: path for folder in reports for path in sorted((folder / FAILURES).glob("*"))}
    journal = Journal(directory, lambda: run, clock=lambda: run.elapsed)  # lists earlier saved failures, to remove them
    run = replace(run, records=[_copy_saved(record, saved, directory / FAILURES) for record in run.records])
    journal.sources = LoadedSources(run.loaded, run.unverified)
    try:
        with closing(journal):
            for record in run.records:
                journal.add(record)
    except JournalError as error:
        raise MergeError(f"{directory}: cannot be written: {error.__cause__ or error}") from error
    return run


def _copy_saved(record: dict[str, Any], saved: dict[str, Path], target: Path) -> dict[str, Any]:
    if not record["saved"]:
        return record
    name = os.path.basename(record["saved"].replace("\\", "/"))
    if name not in saved:
        note = f"not with its shard: {record['saved']}"
        return record | {"saved": "", "save_note": "; ".join(filter(None, [record["save_note"], note]))}
    try:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(saved[name], target / name)
    except OSError as error:
        raise MergeError(f"{saved[name]}: cannot be copied to {target}: {error.strerror}") from error
    return record | {"saved": str(target / name)}
