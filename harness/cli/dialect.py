"""`narrowgauge dialect`: fit the rule of a quantizer to its bytes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from narrowgauge.harness.cli.options import BackendArgument, Contracts, Device, Rules, Seed, stop
from narrowgauge.harness.cli.selection import require_device

Details = Annotated[bool, typer.Option("--details", help="Also a row for each input.")]


class Form(StrEnum):
    """Forms of the result."""

    TABLE = "table"
    JSON = "json"
    ISSUE = "issue"


Format = Annotated[
    Form, typer.Option("--format", help="Form of the result; issue: an issue text of the differences from the nearest.")
]


def which_dialect(
    backend: BackendArgument,
    contract: Contracts = None,
    name: Annotated[
        str, typer.Option("--recipe", help="What its quantize is asked for (default: nvfp4), or its contract.")
    ] = "",
    device: Device = "cpu",
    seed: Seed = 0,
    details: Details = False,
    form: Format = Form.TABLE,
    save: Annotated[
        Path | None,
        typer.Option("--save", help="Add the rule to this file of rules (TOML). The rule is named after the file."),
    ] = None,
    rules: Rules = None,
) -> None:
    """Say which dialect a quantizer follows, and where it differs.

    The dialect is a library's rule; every difference from it has a class. With --contract it is the values of the
    fields of each contract. Exit status 0 if a dialect with the listed differences, all of a known class, explains
    every input; 1 if not.
    """
    require_device(device)
    if contract:
        _of_contracts(backend, contract, [name] if name else [], device, seed, form)
    name = name or "nvfp4"
    from rich.console import Console

    from narrowgauge.harness.backends.backend import BackendError, Unsupported
    from narrowgauge.harness.backends.host import HostLost
    from narrowgauge.harness.hosts.remote_host import hosted_backend
    from narrowgauge.harness.machine.process import one_thread
    from narrowgauge.harness.tools.dialect import report, terminal
    from narrowgauge.harness.tools.dialect.fit import fit
    from narrowgauge.harness.tools.dialect.issue import issue as issue_text
    from narrowgauge.harness.tools.dialect.versions import line

    try:
        with one_thread(), hosted_backend(backend, device) as loaded:
            result = fit(loaded, name, device=device, seed=seed)
            text = issue_text(result, loaded, backend, seed=seed) if form is Form.ISSUE else ""
    except (BackendError, Unsupported, HostLost, ValueError) as error:
        stop(str(error))
    console = Console(highlight=False)
    if form is Form.ISSUE:
        typer.echo(text)
    elif form is Form.JSON:
        import json

        typer.echo(json.dumps(report.as_json(result, backend), indent=2))
    else:
        console.print(f"{result.recipe}   backend {backend}, device {device}, seed {seed}", markup=False)
        console.print(line(backend), markup=False, soft_wrap=True)
        console.print(terminal.table(result))
        if details:
            terminal.print_rows(result, console)
        console.print(report.sentence(result), markup=False, soft_wrap=True)
        if rule := report.pasted(result, save.stem if save else "own"):
            console.print(rule, markup=False, soft_wrap=True)
    if save is not None:
        try:
            name = report.save(result, save, backend)
        except ValueError as error:
            stop(str(error))
        typer.echo(f'{save}: has the rule {name}; narrowgauge.check(function, "{save}") judges by it', err=True)
    raise typer.Exit(0 if result.explained else 1)


def _of_contracts(backend: str, files: list[Path], recipes: list[str], device: str, seed: int, form: Form) -> NoReturn:
    """Print the values of the fields of each contract of the files for which the backend has a method."""
    import json

    from narrowgauge.harness.backends.backend import BackendError
    from narrowgauge.harness.backends.host import HostLost
    from narrowgauge.harness.cases.contracts.case import recipes_of
    from narrowgauge.harness.cases.operations import OperationError, contracts_in
    from narrowgauge.harness.hosts.remote_host import hosted_backend
    from narrowgauge.harness.tools.dialect.contract import fit_contract

    if form is Form.ISSUE:
        stop("--format issue is of a quantizer; a contract has table and json")
    try:
        classes = [cls for file in files for cls in contracts_in(file)]
        with hosted_backend(backend, device) as loaded:
            own = [cls for cls in classes if loaded.has(next(iter(cls.all_methods())))]
            if not own:
                stop(f"backend {backend} has no method of {', '.join(cls.operation for cls in classes)}")
            fits = [fit_contract(loaded, cls, names, seed) for cls, names in recipes_of(own, recipes).items()]
    except (BackendError, HostLost, OperationError, ValueError) as error:
        stop(str(error))
    for fit in fits:
        if form is Form.JSON:
            typer.echo(json.dumps(fit.as_json()))
        else:
            typer.echo("\n".join([fit.contract, *(f"  {line}" for line in fit.lines())]))
    raise typer.Exit(0 if all(fit.explained for fit in fits) else 1)
