"""`narrowgauge soak`: the same cases over many seeds."""

from __future__ import annotations

from typing import Annotated

import typer

from narrowgauge.harness.cli.options import (
    BackendOption,
    Device,
    Keyword,
    Operations,
    Paths,
    Rules,
    Tier,
    Workers,
    default_cases,
    stop,
)
from narrowgauge.harness.cli.selection import (
    choose_cases,
    default_workers,
    ledger_of,
    load_cases,
    require_backend,
    require_device,
    require_device_name,
)


def soak_cases(
    paths: Paths = None,
    operations: Operations = None,
    rules: Rules = None,
    tier: Tier = "quick",
    keyword: Keyword = "",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds.")] = 200,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="The first seed (default: one drawn afresh, and printed).")
    ] = None,
    share: Annotated[
        float, typer.Option("--share", min=0.0, max=1.0, help="Share of the cases: the cheapest that hold all recipes.")
    ] = 0.1,
    backend: BackendOption = "native",
    device: Device = "cpu",
    workers: Workers = 0,
) -> None:
    """Run a part of the cases over many seeds. Exit status 0 only if every run passed, or failed as is known."""
    cases = load_cases(paths, None, None, None)
    require_device_name(device)
    selected = choose_cases(cases, tier, keyword, device)
    ledger = ledger_of(None, paths or [default_cases()], cases)
    launched = ledger.launchable(selected, backend=backend, device=device)
    if skipped := len(selected) - len(launched):
        typer.echo(f"{skipped} of {len(selected)} cases are known to crash or hang, and are not run", err=True)
    require_device(device)
    require_backend(backend)
    import secrets

    from rich.console import Console

    from narrowgauge.harness.backends.backend import BackendError
    from narrowgauge.harness.running.pool import Settings
    from narrowgauge.harness.tools.soak import soak, soak_selection

    start = secrets.randbelow(1 << 31) if seed is None else seed
    settings = Settings(backend, device, workers=workers or default_workers(device))
    try:
        part = soak_selection(launched, share)
        passed = soak(part, range(start, start + seeds), settings, Console(), ledger=ledger)
    except BackendError as error:
        stop(str(error))
    raise typer.Exit(0 if passed else 1)
