"""`narrowgauge run`: run cases and write a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.harness.cli.options import (
    BackendOption,
    Contracts,
    Device,
    Durations,
    Functions,
    Input,
    Keyword,
    KnownFile,
    Link,
    NoHistory,
    Operations,
    Paths,
    Recipes,
    Rules,
    Sanitize,
    Schedules,
    Seed,
    ShardOption,
    Tensors,
    Tier,
    Workers,
    command_line,
    default_cases,
    stop,
)
from narrowgauge.harness.cli.selection import (
    choose_cases,
    default_workers,
    ledger_of,
    load_cases,
    offered_cases,
    part_of_run,
    require_backend,
    require_device,
    require_device_name,
    require_link,
    require_sanitizer,
    require_schedules,
)

if TYPE_CHECKING:
    from narrowgauge.harness.cases.case import Case


def run(
    paths: Paths = None,
    contract: Contracts = None,
    operations: Operations = None,
    rules: Rules = None,
    functions: Functions = None,
    tier: Tier = "quick",
    keyword: Keyword = "",
    backend: BackendOption = "native",
    device: Device = "cpu",
    seed: Seed = 0,
    source: Input = None,
    tensors: Tensors = None,
    recipes: Recipes = None,
    shard: ShardOption = "",
    durations: Durations = None,
    workers: Workers = 0,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that one case may take.")] = 300.0,
    report_dir: Annotated[Path, typer.Option("--report-dir", help="Where the report goes.")] = Path("reports/latest"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run of --report-dir that was ended.")
    ] = False,
    known: KnownFile = None,
    link: Link = "",
    schedules: Schedules = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Unsupported cases are failures.")] = False,
    untrusted: Annotated[
        bool, typer.Option("--untrusted", help="Drawn cases, and no reference in the process of the kernels.")
    ] = False,
    fresh_host: Annotated[
        bool, typer.Option("--fresh-host", help="Of --untrusted: a new process of the kernels for every case.")
    ] = False,
    secret: Annotated[
        int | None, typer.Option("--secret", min=0, help="Of --untrusted: the secret of an earlier run.")
    ] = None,
    sanitize: Sanitize = False,
    details: Annotated[
        bool, typer.Option("--details", help="Print a row for each recipe and dtype, accuracy and times too.")
    ] = False,
    no_history: NoHistory = False,
) -> None:
    """Run cases and write a report.

    Exit status: 0 if at least one case passed and no case failed beside those of the ledger; 2 if nothing could run;
    else 1.
    """
    shuffles = require_schedules(schedules, device)
    if sanitize:
        require_sanitizer(device)
    require_link(link)
    require_device_name(device)
    paths = [*(paths or []), *(contract or [])] or None
    cases = load_cases(paths, source, tensors, recipes)
    if untrusted:
        drawn, secret, seed = _drawn(cases, tier, backend, source, secret, device)
        chosen = choose_cases(drawn, "full", keyword, device)
    else:
        if fresh_host or secret is not None:
            stop("--fresh-host and --secret belong to --untrusted; add --untrusted")
        chosen = choose_cases(cases, tier, keyword, device)
    ledger = ledger_of(known, (paths or [default_cases()]) if source is None else [], cases)
    require_device(device)
    require_backend(backend)
    chosen, matrix = offered_cases(chosen, backend, device)
    part = part_of_run(chosen, shard, durations)
    chosen, matrix = (part.cases, []) if part else (chosen, matrix)
    from narrowgauge.harness.backends.backend import BackendError
    from narrowgauge.harness.records.journal import JournalError
    from narrowgauge.harness.report.report import ReportError
    from narrowgauge.harness.running.pool import Settings
    from narrowgauge.harness.tools.run_cases import run_session

    settings = Settings(
        backend, device, seed, workers=workers or default_workers(device), timeout=timeout,
        input_path="" if source is None else str(source), schedules=shuffles, sanitize=sanitize, untrusted=untrusted,
        fresh_host=fresh_host,
    )  # fmt: skip
    expected: tuple[type[Exception], ...] = (BackendError, JournalError, ReportError)
    if source is not None:
        from narrowgauge.harness.inputs.capture import CaptureError

        expected = (*expected, CaptureError)
    try:
        passed = run_session(
            chosen,
            settings,
            report_dir,
            matrix=matrix,
            resume=resume,
            part=part,
            ledger=ledger,
            link=link,
            strict=strict,
            details=details,
            history=not no_history,
            command=command_line("run", without="--resume"),
        )
    except expected as error:
        stop(str(error))
    if untrusted:
        typer.echo(f"drawn cases: --untrusted --secret {secret} runs them again")
    raise typer.Exit(0 if passed else 1)


def _drawn(
    cases: list[Case], tier: str, backend: str, source: Path | None, secret: int | None, device: str
) -> tuple[list[Case], int, int]:
    """Drawn cases of a tier on a device, their secret, and the seed of their inputs."""
    from narrowgauge.harness.inputs.drawn_cases import drawn_cases, input_seed, new_secret

    if source is not None:
        stop(f"--untrusted draws inputs, and --input has its own: {source}; give one of them")
    if backend == "reference":
        stop("--untrusted takes the reference from the backend, so the backend cannot be the reference")
    secret = new_secret() if secret is None else secret
    return drawn_cases(choose_cases(cases, tier, "", device), secret, matrix=cases), secret, input_seed(secret)
