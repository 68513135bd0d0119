"""Which cases a command is for, and what it needs to begin. Each stops the command that asks for what there is not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from narrowgauge.harness.cli.options import default_cases, stop

if TYPE_CHECKING:
    from narrowgauge.harness.cases.case import Case
    from narrowgauge.harness.gate.ledger import Ledger
    from narrowgauge.harness.running.shard import Part


def select_cases(
    paths: list[Path] | None,
    tier: str,
    keyword: str,
    source: Path | None,
    tensors: list[str] | None,
    recipes: list[str] | None,
) -> list[Case]:
    """The cases of a command that needs nothing else of the files: `load_cases`, and `choose_cases` of them."""
    return choose_cases(load_cases(paths, source, tensors, recipes), tier, keyword)


def choose_cases(cases: list[Case], tier: str, keyword: str) -> list[Case]:
    """Those of a tier that a keyword expression selects; at least one."""
    from narrowgauge.harness.cases.case import select
    from narrowgauge.harness.cases.schema import TIERS, nearest

    if tier not in TIERS:
        stop(f"--tier is {tier!r}{nearest(tier, TIERS)}; it can be {', '.join(TIERS)}")
    try:
        chosen = select(cases, tier=tier, keyword=keyword)
    except ValueError as error:
        stop(str(error))
    if not chosen:
        stop(f"no case of {len(cases)} is selected by --tier {tier}" + (f" -k {keyword!r}" if keyword else ""))
    return chosen


def load_cases(
    paths: list[Path] | None, source: Path | None, tensors: list[str] | None, recipes: list[str] | None
) -> list[Case]:
    """All cases of the files and folders, or of captured tensors."""
    from narrowgauge.harness.cases.case import CaseFileError, load_all

    if source is None and tensors:
        stop("--tensor names tensors of an --input file, and none is given")
    if source is None and recipes:
        stop("--recipe names recipes for an --input file, and none is given")
    if source is not None and paths:
        stop(f"cases come from case files or from --input, not from both: {paths[0]} and {source}")
    try:
        if source is None:
            return load_all(paths or [default_cases()])
        from narrowgauge.harness.inputs.capture import Captured, captured_cases, refused
        from narrowgauge.spec.recipes import find_recipe

        captured = Captured.load(source, tensors)
        names = [str(find_recipe(name)) for name in recipes or ["nvfp4"]]
        for note in [captured.note(), *refused(captured, recipes=names)]:
            if note:
                typer.echo(note, err=True)
        return captured_cases(captured, recipes=names)
    except (CaseFileError, ValueError) as error:
        stop(str(error))


def ledger_of(file: Path | None, paths: list[Path], cases: list[Case]) -> Ledger:
    """The ledger of a run of these case files and folders, checked against the cases that were loaded from them."""
    from narrowgauge.harness.cases.case import CaseFileError
    from narrowgauge.harness.gate.ledger import LedgerError, beside, folders_of, load

    try:
        ledger = beside(paths) if file is None else load(file)
        ledger.check(cases, folders_of(paths))
    except (LedgerError, CaseFileError) as error:
        stop(str(error))
    return ledger


def require_link(link: str) -> None:
    """Stop unless there is no link, or it is the address of a page."""
    from narrowgauge.harness.gate.ledger import is_link

    if link and not is_link(link):
        stop(f"--link is {link!r}; it is the address of a page: https://…")


def require_device(device: str) -> None:
    """Stop unless kernels can run there."""
    from narrowgauge.harness.cases.schema import nearest

    devices = ("cpu", "cuda")
    if device not in devices:
        stop(f"--device is {device!r}{nearest(device, devices)}; it can be {', '.join(devices)}")
    from narrowgauge.harness.backends.backend import BackendError, check_device

    try:
        check_device(device)
    except BackendError as error:
        stop(str(error))


def part_of_run(cases: list[Case], shard: str, durations: Path | None) -> Part | None:
    """The part of the cases that is this shard's, where there are shards."""
    from narrowgauge.harness.records.journal import JournalError
    from narrowgauge.harness.running.shard import Shard, ShardError, part_of, read_durations

    if not shard:
        if durations is not None:
            stop("--durations divides cases into shards, and no --shard is given")
        return None
    try:
        return part_of(cases, Shard.parse(shard), read_durations(durations) if durations else None)
    except (ShardError, JournalError) as error:
        stop(str(error))


def default_workers(device: str) -> int:
    """Processes of a run that is not told how many: one a core; with GPUs a quarter more, at most 20 a GPU."""
    from narrowgauge.harness.machine.processors import cores, visible

    if device == "cpu":
        return cores()
    # Most cases of a GPU are judged on the CPU, and a third of what processes do is wait for turns on the GPU. Each
    # takes half a gigabyte of it.
    gpus = max(1, len(visible()))
    return max(gpus, min(cores() * 5 // 4, 20 * gpus))
