"""Merging: the journals of the shards of one run become that run, as if it had never been divided."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from narrowgauge.harness.gate.accepted import say_baseline
from narrowgauge.harness.records.journal import FAILURES, Journal, JournalError, Run, read
from narrowgauge.harness.records.record import succeeded
from narrowgauge.harness.report import github
from narrowgauge.harness.report.report import write
from narrowgauge.harness.report.text import duration, plural
from narrowgauge.harness.running.shard import Shard, ShardError, digest

NAMED = 5
"""Shards or cases that a sentence names; it says how many there are."""
SETTINGS: dict[str, Callable[[Run], Any]] = {
    "backend": lambda run: run.backend, "device": lambda run: run.device, "seed": lambda run: run.seed,
    "--schedules": lambda run: run.schedules, "--sanitize": lambda run: run.sanitize,
    **{
        name: lambda run, name=name: run.environment.get(name)  # type: ignore[misc]
        for name in ("GPU", "commit", "kernel flags", "kernel sources")
    },
}  # fmt: skip
"""What all shards of a run share, by the name that a refusal gives it."""


class MergeError(Exception):
    """Journals that are not the shards of one run: which, why, and what to do."""


def merge(folders: Sequence[Path]) -> Run:
    """The run whose shards these journals are, each of a report's folder, or itself: the records in order of their ids.

    What is not the same in all shards of the environment names the shards that it is of. The run took as long as its
    longest shard. Raises MergeError where the journals are not all shards of one run, each once and complete,
    JournalError where one cannot be read.
    """
    shards = sorted(((_shard(folder, run), folder, run) for folder in folders for run in [read(folder)]), key=_number)
    counts = {shard.count: folder for shard, folder, _ in shards}
    if len(counts) > 1:
        said = ", ".join(f"{folder} is one of {count}" for count, folder in sorted(counts.items()))
        raise MergeError(f"shards of different numbers of shards: {said}")
    for (shard, folder, _), (following, again, _) in pairwise(shards):
        if shard == following:
            raise MergeError(f"shard {shard} is given twice: {folder} and {again}")
    (_, first, run), *others = shards
    for _, folder, other in others:
        _same(first, run, folder, other)
    _complete(shards)
    return replace(
        run, shard=None, selection="", cases=sorted(case for _, _, part in shards for case in part.cases),
        environment=_environment([(shard, part.environment) for shard, _, part in shards]),
        elapsed=max(part.elapsed for _, _, part in shards),
        records=sorted((record for _, _, part in shards for record in part.records), key=lambda r: str(r["case"])),
    )  # fmt: skip


def merge_session(folders: Sequence[Path], directory: Path, *, link: str = "") -> bool:
    """Merge the shards in these folders into a report in `directory`, print the summary. True where the run succeeded.

    `link`: the address that the summary of the report ends with. Raises MergeError and JournalError as `merge` does,
    MergeError also where `directory` cannot be written.
    """
    from rich.console import Console

    from narrowgauge.harness.tools.run_cases import print_result

    console, link = Console(), link or github.run_link()
    run = gather(merge(folders), folders, directory)
    of_cases = sum(record.get("seconds_total") or 0.0 for record in run.records)
    took = f"{duration(run.elapsed)}, that of the longest shard; all cases together {duration(of_cases)}"
    environment = run.environment | {"time": took}
    say_baseline(run.records, environment)
    try:
        page = write(run.records, environment, directory, elapsed=run.elapsed, link=link)
    except OSError as error:
        raise MergeError(f"{directory}: cannot be written: {error}") from error
    print_result(run.records, console)
    words = f"{len(run.records)} cases of {plural(len(folders), 'shard')} in {took}; report: {page}"
    console.print(words, markup=False, soft_wrap=True)
    github.publish(run.records, environment, run.elapsed, link=link, say=print)
    return succeeded(run.records)


def _number(found: tuple[Shard, Path, Run]) -> int:
    return found[0].number


def _shard(folder: Path, run: Run) -> Shard:
    if run.shard is None:
        raise MergeError(f"{folder}: is a whole run, and no shard of one")
    try:
        return Shard.parse(run.shard)
    except ShardError as error:
        raise MergeError(f"{folder}: its journal says {error}") from error


def _same(first: Path, run: Run, folder: Path, other: Run) -> None:
    for name, get in SETTINGS.items():
        if get(run) != get(other):
            raise MergeError(f"shards of different runs: {name} is {get(run)} in {first}, {get(other)} in {folder}")
    for name in sorted(run.sources | other.sources):
        if run.sources.get(name) != other.sources.get(name):
            raise MergeError(f"shards of different runs: the source of {name} is not the same in {first} and {folder}")
    if run.selection != other.selection:
        raise MergeError(
            f"shards of different runs: {first} and {folder} select different cases; run every shard with the same "
            "case files, tier and keywords"
        )


def _complete(shards: Sequence[tuple[Shard, Path, Run]]) -> None:
    """Raise MergeError where a shard, a case or a record is missing."""
    count = shards[0][0].count
    given = {shard.number for shard, _, _ in shards}
    if missing := [f"{number}/{count}" for number in range(1, count + 1) if number not in given]:
        raise MergeError(f"{len(missing)} of {count} shards are missing: {_named(missing)}")
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
                f"record: {_named(run.missing)}; go on with --resume"
            )


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _environment(found: Iterable[tuple[Shard, dict[str, str]]]) -> dict[str, str]:
    """Every fact once; where shards differ, each value with the shards that say so."""
    facts: dict[str, dict[str, list[int]]] = {}
    for shard, environment in found:
        for name, value in environment.items():
            facts.setdefault(name, {}).setdefault(value, []).append(shard.number)
    merged = {}
    for name, values in facts.items():
        said = (f"{value} (shard {', '.join(map(str, numbers))})" for value, numbers in values.items())
        merged[name] = next(iter(values)) if len(values) == 1 else "; ".join(said)
    return merged


def gather(run: Run, folders: Iterable[Path], directory: Path) -> Run:
    """`run` with the failures that its shards saved copied into `directory`, and its journal written there.

    A saved failure that did not come along with its shard is noted. Raises MergeError where `directory` is one of the
    shards', or a failure cannot be copied.
    """
    reports = [folder if folder.is_dir() else folder.parent for folder in folders]
    for folder in reports:
        if folder.resolve() == directory.resolve():
            raise MergeError(f"--report-dir is {directory}, which is a shard's: it would be replaced; name another one")
    saved = {path.name: path for folder in reports for path in sorted((folder / FAILURES).glob("*"))}
    journal = Journal(directory, lambda: run, clock=lambda: run.elapsed)  # it has seen what was saved there before
    run = replace(run, records=[_brought(record, saved, directory / FAILURES) for record in run.records])
    try:
        with closing(journal):
            for record in run.records:
                journal.add(record)
    except JournalError as error:
        raise MergeError(f"{directory}: cannot be written: {error.__cause__ or error}") from error
    return run


def _brought(record: dict[str, Any], saved: dict[str, Path], target: Path) -> dict[str, Any]:
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
