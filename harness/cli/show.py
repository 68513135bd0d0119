"""`narrowgauge show`: one case, element by element."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.harness.cli.options import BackendOption, Device, Input, Recipes, Seed, stop
from narrowgauge.harness.cli.selection import require_device, select_cases

if TYPE_CHECKING:
    from narrowgauge.harness.records.saved_failure import SavedFailure


def show(
    case_id: Annotated[str, typer.Argument(metavar="CASE", help="A case id, as `list` and reports print it.")],
    paths: Annotated[list[Path] | None, typer.Option("--cases", help="Case files (default: cases).")] = None,
    backend: BackendOption = "native",
    device: Device = "cpu",
    seed: Seed = 0,
    source: Input = None,
    recipes: Recipes = None,
    at: Annotated[str, typer.Option("--at", help="row,column to show (default: the first wrong element).")] = "",
    saved: Annotated[
        Path | None, typer.Option("--saved", help="A saved failure of the case: its inputs, and the shape they have.")
    ] = None,
) -> None:
    """Run one case and print its stages, element by element, around one place."""
    from narrowgauge.harness.cases.keys import nearest

    failure = None
    if saved is not None:
        if paths or source or recipes or seed:
            stop("--saved has its own inputs; --cases, --input, --recipe and --seed do not go with it")
        failure = _saved(saved, case_id)
        case, seed = failure.case, failure.seed
    else:
        cases = {case.id: case for case in select_cases(paths, "full", "", source, None, recipes)}
        if case_id not in cases:
            stop(f"no case is called {case_id!r}{nearest(case_id, cases)}")
        case = cases[case_id]
    require_device(device)
    from narrowgauge.harness.backends.backend import BackendError, Unsupported
    from narrowgauge.harness.hosts.remote_host import hosted_backend
    from narrowgauge.harness.tools.show import show_case

    if at and not re.fullmatch("[0-9]{1,18},[0-9]{1,18}", at):
        stop(f"--at is {at!r}; it is a row and a column: --at 3,17")
    row, _, column = at.partition(",")
    place = (int(row), int(column)) if at else None
    try:
        with hosted_backend(backend, device) as loaded:
            passed = show_case(
                case, loaded, device=device, seed=seed, source=source, place=place,
                saved=failure.inputs if failure else None,
            )  # fmt: skip
    except (BackendError, Unsupported) as error:
        stop(str(error))
    raise typer.Exit(0 if passed else 1)


def _saved(path: Path, case_id: str) -> SavedFailure:
    """The failure in a file. The failure must belong to the case."""
    from narrowgauge.harness.records.saved_failure import SavedFailureError, load

    try:
        failure = load(path)
    except SavedFailureError as error:
        stop(str(error))
    if failure.id != case_id:
        stop(f"{path}: holds a failure of {failure.id}, not of {case_id}")
    return failure
