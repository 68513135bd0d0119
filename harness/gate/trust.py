"""Whether a finished run can be trusted: lines and header of its journal, its records, and its sources.

The commands that compare runs read the runs by `read_trusted`. A run that contradicts itself is refused before any
comparison: it is not worse than a baseline, it says nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from narrowgauge.harness.cases.contracts.traces import contracts_of
from narrowgauge.harness.records.environment import CONTRACT, RULE, kernel_hash, source_hashes
from narrowgauge.harness.records.journal import JOURNAL_NAME, Lines, RecordedRun, UntrustedRunError, read_with_lines
from narrowgauge.harness.records.loaded_sources import differences
from narrowgauge.harness.records.record_check import DEVICES
from narrowgauge.harness.records.typed import shown
from narrowgauge.spec.program import ContractError
from narrowgauge.spec.recipes import OwnRule, RuleError, read_rules

_IN_RECORDS = ("backend", "device", "seed")
"""Fields of the header that every record repeats."""
_IN_ENVIRONMENT = (*_IN_RECORDS, "schedules")
"""Fields of the header that its environment repeats."""
_GPU = re.compile(r".+, compute capability \d+\.\d+")


def read_trusted(path: Path) -> RecordedRun:
    """The run in the report folder or journal file `path`.

    Raises UntrustedRunError if the run contradicts itself, JournalError if there is no journal, or no readable journal.
    """
    run, lines = read_with_lines(path)
    problems = [*_line_problems(path, lines, len(run.records)), *_header_problems(run)] or list(_run_problems(run))
    if problems:
        raise UntrustedRunError(path, problems, run.command)
    return run


def verify_sources(run: RecordedRun, path: Path) -> list[str]:
    """Compare the hashes of the sources in the header of a run with the sources of this narrowgauge, and of the backend
    and the captured tensors as this process finds them. `path`: place of the run, for messages.

    Returns a sentence per source without a comparison, because its file is not found. Raises UntrustedRunError
    for a changed source.
    """
    problems, notes = differences(run.loaded)
    notes += [f"{name}: {reason}" for name, reason in run.unverified.items()]
    file = _input_path(run)
    try:
        current = source_hashes(run.backend, file or "")
    except OSError as error:
        raise UntrustedRunError(path, [f"sources: {error.filename} cannot be read: {error.strerror}"]) from error
    if run.loaded:  # with the module of the backend
        current["backend"] = run.sources.get("backend", "")
    elif _is_own(run.backend):
        notes.append("modules that the backend imports: the run has no list of them, so they were not compared")
    if _is_own(run.backend) and not run.loaded and not current["backend"]:
        current["backend"] = run.sources.get("backend", "")
        notes.append(
            f"backend {run.backend}: its module is no Python file in this folder or on sys.path, so its source was not "
            "compared with the source of the run"
        )
    if "input" in run.sources and file is None:
        current["input"] = run.sources["input"]
        notes.append("input: the file of the captured tensors is not there, so it was not compared")
    rules, found = _rules_now(run)
    current = {part: value for part, value in current.items() if not part.startswith((RULE, CONTRACT))} | rules
    notes += found
    if "operations" in run.sources and "operations" not in current:
        current["operations"] = run.sources["operations"]
        notes.append("operations: none are given by --operations, so their sources were not compared")
    recorded = {f"sources: {part}": run.sources.get(part) for part in sorted(run.sources | current)}
    now = {f"sources: {part}": value for part, value in current.items()}
    if "kernel sources" in run.environment:
        recorded["environment: kernel sources"] = run.environment["kernel sources"]
        now["environment: kernel sources"] = kernel_hash()
    problems += [
        f"{part} has changed since the run: {shown(value)} in its header, {shown(now.get(part))} now"
        for part, value in recorded.items()
        if value != now.get(part)
    ]
    if problems:
        raise UntrustedRunError(path, problems, run.command)
    return notes


def _rules_now(run: RecordedRun) -> tuple[dict[str, str], list[str]]:
    """The sources of a run that are rules and contracts of a user, as their files have them now; a sentence per missing
    file."""
    now: dict[str, str] = {}
    notes = []
    for part, value in run.sources.items():
        file = value.partition(" in ")[2]
        if not part.startswith((RULE, CONTRACT)):
            continue
        if not Path(file).is_file():
            now[part] = value
            notes.append(f"{part}: the file {file} is not there, so it was not compared with that of the run")
            continue
        read = _rule_now if part.startswith(RULE) else _contract_now
        try:
            digest = read(Path(file), part.removeprefix(RULE).removeprefix(CONTRACT))
        except (RuleError, ContractError) as error:
            now[part] = str(error)
            continue
        now[part] = f"{digest} in {file}" if digest else f"none in {file}"
    return now, notes


def _rule_now(file: Path, name: str) -> str:
    rule = read_rules(file).get(name)
    return "" if rule is None else OwnRule(rule, file).digest


def _contract_now(file: Path, name: str) -> str:
    contract = contracts_of(file).get(name)
    return "" if contract is None else contract.digest


def _line_problems(path: Path, lines: Lines, records: int) -> Iterator[str]:
    """Times that are no times, and cases with several lines. `records`: number of cases that have a record."""
    if wrong := [elapsed for elapsed in lines.elapsed if not 0 <= elapsed < math.inf]:
        yield f"elapsed is {wrong[0]}, not a finite number ≥ 0"
    if lines.records > records:
        cases = Counter(entry["case"] for entry in map(json.loads, _lines(path)) if "case" in entry)
        for case, count in cases.items():
            if count > 1:
                yield f"record {case!a}: is there {count} times, and a run makes one record of each case"


def _lines(path: Path) -> Iterator[bytes]:
    """The complete lines of a journal behind its header."""
    with (path / JOURNAL_NAME if path.is_dir() else path).open("rb") as file:
        next(file, b"")
        yield from (line for line in file if line.endswith(b"\n"))


def _header_problems(run: RecordedRun) -> Iterator[str]:
    """Impossible values of a field, and contradicting fields."""
    if run.device not in DEVICES:
        yield f"header: device is {shown(run.device)}, not {', '.join(DEVICES)}"
    if repeated := [case for case, count in Counter(run.cases).items() if count > 1]:
        yield f"header: cases has {shown(repeated[0])} twice"
    if not run.environment:
        yield "header: environment is empty, and a run describes its machine"
    if run.schedules < 1:
        yield f"header: schedules is {run.schedules}, not a number ≥ 1"
    if run.shard is None and run.selection:
        yield f"header: selection is {shown(run.selection)}, of a shard, and shard is None"
    for name in _IN_ENVIRONMENT:
        value, recorded = str(getattr(run, name)), run.environment.get(name)
        if recorded is not None and recorded != value:
            yield f"header: {name} is {shown(value)}, and {shown(recorded)} in environment"
    gpu = run.environment.get("GPU", "")
    if run.device == "cuda" and not _GPU.fullmatch(gpu):
        yield f"header: device is cuda, and GPU in environment is {shown(gpu)}, without a compute capability"


def _run_problems(run: RecordedRun) -> Iterator[str]:
    """Records that contradict the header."""
    selected = set(run.cases)
    for record in run.records:
        case = f"record {record['case']!a}"
        for name in _IN_RECORDS:
            if record.get(name) != getattr(run, name):
                yield f"{case}: {name} is {shown(record.get(name))}, and the header has {shown(getattr(run, name))}"
        if record["case"] not in selected:
            yield f"{case}: is not in cases of the header"


def _is_own(backend: str) -> bool:
    """Whether a backend is a user's: `package.module:Name`, and none of the examples of this package."""
    return (":" in backend or "." in backend) and not backend.startswith("narrowgauge.")


def _input_path(run: RecordedRun) -> str | None:
    """The file of captured tensors in the records of a run, if found by this process."""
    files = {record["file"] for record in run.records}
    with suppress(OSError):  # a name that is too long
        if "input" in run.sources and len(files) == 1 and Path(file := files.pop()).is_file():
            return str(file)
    return None
