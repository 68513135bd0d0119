"""Selection of cases, and checks of options. Each function ends the command with a usage error if a check fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from narrowgauge.harness.cli.options import default_cases, stop

if TYPE_CHECKING:
    from narrowgauge.harness.cases.case import Case
    from narrowgauge.harness.gate.ledger import Ledger
    from narrowgauge.harness.running.shard import Part

_REASONS = 3
"""Number of printed reasons for which cases are left out."""


def select_cases(
    paths: list[Path] | None,
    tier: str,
    keyword: str,
    source: Path | None,
    tensors: list[str] | None,
    recipes: list[str] | None,
    device: str,
) -> list[Case]:
    """Load and select the cases of a command: `load_cases`, then `choose_cases`."""
    return choose_cases(load_cases(paths, source, tensors, recipes), tier, keyword, device)


def choose_cases(cases: list[Case], tier: str, keyword: str, device: str) -> list[Case]:
    """Cases of a tier on a device that match a keyword expression. No match is an error."""
    from narrowgauge.harness.cases.case import select
    from narrowgauge.harness.cases.keys import TIERS, nearest

    if tier not in TIERS:
        stop(f"--tier is {tier!r}{nearest(tier, TIERS)}; it can be {', '.join(TIERS)}")
    try:
        chosen = select(cases, tier=tier, keyword=keyword, device=device)
    except ValueError as error:
        stop(str(error))
    if not chosen:
        stop(f"no case of {len(cases)} is selected by --tier {tier}" + (f" -k {keyword!r}" if keyword else ""))
    return chosen


def load_cases(
    paths: list[Path] | None, source: Path | None, tensors: list[str] | None, recipes: list[str] | None
) -> list[Case]:
    """All cases of the files and folders, or of captured tensors. Says which foreign TOML files are passed over."""
    from narrowgauge.harness.cases.case_file import CaseFileError, load_all, passed_over_note, unused_default
    from narrowgauge.harness.cases.contracts.case import no_recipe_note
    from narrowgauge.harness.cases.operations import contracts_in

    if source is None and tensors:
        stop("--tensor names tensors of an --input file, and none is given")
    contracts = any(path.suffix == ".py" for path in paths or ())
    if source is None and recipes and not contracts:
        stop("--recipe names recipes for an --input file or for contracts, and none is given")
    if source is not None and paths:
        stop(f"cases come from case files or from --input, not from both: {paths[0]} and {source}")
    try:
        if source is None:
            foreign: list[Path] = []
            cases = load_all(paths or [default_cases()], foreign=foreign, recipes=recipes or ())
            for path in (path for path in paths or () if path.suffix == ".py"):
                if note := no_recipe_note(contracts_in(path), recipes or []):
                    typer.echo(note, err=True)
            if foreign:
                typer.echo(passed_over_note(foreign), err=True)
            elif not paths and (unused := unused_default()):
                typer.echo(f"the shipped cases are taken; {passed_over_note(unused)}", err=True)
            return cases
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


def offered_cases(cases: list[Case], backend: str, device: str) -> tuple[list[Case], list[Case]]:
    """The cases that a backend offers to run (`harness.backends.offer`), and those that it would without constraints.

    Prints how many other cases are left out and why. The second list is empty for a built-in backend.
    """
    from narrowgauge.harness.backends.backend import BackendError
    from narrowgauge.harness.backends.host import HostLost
    from narrowgauge.harness.backends.loading import BUILT_IN

    if backend in BUILT_IN:
        return cases, []
    from narrowgauge.harness.hosts.remote_host import hosted_backend  # imports torch

    try:
        with hosted_backend(backend, device) as loaded:
            offer = loaded.offer
    except (BackendError, HostLost) as error:
        stop(str(error))
    chosen, others = offer.select(cases)
    if others:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in others.most_common(_REASONS))
        more = f", {len(others) - _REASONS} more reasons" if len(others) > _REASONS else ""
        typer.echo(f"{others.total()} cases are left out; backend {backend} {reasons}{more}", err=True)
    if not chosen:
        stop(f"backend {backend} offers none of the {len(cases)} selected cases")
    return chosen, replace(offer, constraints={}).select(cases)[0]


def ledger_of(file: Path | None, paths: list[Path], cases: list[Case]) -> Ledger:
    """Ledger of a run, checked against the cases loaded from these case files and folders."""
    from narrowgauge.harness.cases.case_file import CaseFileError
    from narrowgauge.harness.gate.ledger import LedgerError, folders_of, load, load_beside

    try:
        ledger = load_beside(paths) if file is None else load(file)
        ledger.check(cases, folders_of(paths))
    except (LedgerError, CaseFileError) as error:
        stop(str(error))
    return ledger


def require_link(link: str) -> None:
    """End the command unless the link is empty or a web address."""
    from narrowgauge.harness.gate.ledger import is_link

    if link and not is_link(link):
        stop(f"--link is {link!r}; it is the address of a page: https://…")


def require_device_name(device: str) -> None:
    """End the command unless the device is cpu or cuda."""
    from narrowgauge.harness.cases.keys import nearest

    devices = ("cpu", "cuda")
    if device not in devices:
        gpu = device.lower().startswith(("gpu", "nvidia", "cuda"))
        close = nearest("cuda" if gpu else device, devices)
        stop(f"--device is {device!r}{close}; it can be {', '.join(devices)}")


def require_device(device: str) -> None:
    """End the command unless kernels can run on the device."""
    require_device_name(device)
    from narrowgauge.harness.backends.backend import BackendError, check_device

    try:
        check_device(device)
    except BackendError as error:
        stop(str(error))


def require_backend(backend: str) -> None:
    """End the command unless there is a backend of this name, as far as one knows without its import."""
    from narrowgauge.harness.backends.backend import BackendError
    from narrowgauge.harness.backends.loading import check_name

    try:
        check_name(backend)
    except BackendError as error:
        stop(str(error))


def require_schedules(schedules: int, device: str) -> int:
    """Number of shuffles to request from the backend: 0 for a single schedule. Ends the command if there are none."""
    from narrowgauge.harness.backends.backend import BackendError, check_schedules

    try:
        check_schedules(schedules, device)
    except BackendError as error:
        stop(str(error))
    return schedules if schedules > 1 else 0


def require_sanitizer(device: str) -> None:
    """End the command unless cases on the device can run under the sanitizers."""
    from narrowgauge.harness.backends.backend import BackendError
    from narrowgauge.harness.running.sanitizer import check_sanitizer

    try:
        check_sanitizer(device)
    except BackendError as error:
        stop(str(error))


def part_of_run(cases: list[Case], shard: str, durations: Path | None) -> Part | None:
    """This shard's part of the cases, or None without a shard."""
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
    """Default number of processes: a process per core; with GPUs at most 6 for each GPU."""
    from narrowgauge.harness.machine.processors import cores, visible_gpus

    if device == "cpu":
        return cores()
    # More processes wait for the GPU. A quarter of the quick tier on an H100 with 16 cores took 31.5 s and 125
    # core-seconds with 6 processes, 32.5 s and 147 core-seconds with 8, 38.1 s and 140 core-seconds with 5.
    gpus = max(1, len(visible_gpus()))
    return max(gpus, min(cores(), 6 * gpus))
