"""`narrowgauge show`: one case, element by element."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.harness.cli.options import (
    BackendOption,
    Device,
    Functions,
    Input,
    Operations,
    Paths,
    Recipes,
    Rules,
    Sanitize,
    Schedules,
    Seed,
    stop,
)
from narrowgauge.harness.cli.selection import (
    load_cases,
    require_backend,
    require_device,
    require_sanitizer,
    require_schedules,
)

if TYPE_CHECKING:
    from narrowgauge.harness.cases.case import Case
    from narrowgauge.harness.records.saved_failure import SavedFailure


def show(
    case_id: Annotated[str, typer.Argument(metavar="CASE", help="A case id, as `list` and reports print it.")],
    paths: Paths = None,
    backend: BackendOption = "native",
    operations: Operations = None,
    rules: Rules = None,
    functions: Functions = None,
    device: Device = "cpu",
    seed: Seed = 0,
    source: Input = None,
    recipes: Recipes = None,
    at: Annotated[str, typer.Option("--at", help="row,column to show (default: the first wrong element).")] = "",
    saved: Annotated[
        Path | None, typer.Option("--saved", help="A saved failure of the case: its inputs, and the shape they have.")
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option("--after", metavar="CASE", help="Run this case before, in the same process; may be given again."),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that the calls of a case may take.")] = 300.0,
    path: Annotated[
        Path | None, typer.Option("--path", help="Folder with the module of the backend (default: the current one).")
    ] = None,
    schedules: Schedules = 1,
    untrusted: Annotated[bool, typer.Option("--untrusted", help="No reference in the process of the kernels.")] = False,
    sanitize: Sanitize = False,
) -> None:
    """Run one case in a fresh process and print its stages.

    They are shown element by element, around one place. Every id has a case, in the case files or not. Exit status: 0
    if the case passes; 2 if it could not run, or if the backend does not support it; else 1.
    """
    failure, earlier = None, []
    if saved is not None:
        if paths or source or recipes or seed or after:
            stop("--saved has its own inputs; case files, --input, --recipe, --seed and --after do not go with it")
        failure = _saved(saved, case_id)
        case, seed = failure.case, failure.seed
    else:
        case, *earlier = _cases([case_id, *(after or [])], paths, source, recipes)
    require_device(device)
    if path is not None:
        sys.path.insert(0, str(path.resolve()))
    require_backend(backend)
    shuffles = require_schedules(schedules, device)
    if sanitize:
        require_sanitizer(device)
    from narrowgauge.harness.backends.backend import BackendError, Unsupported
    from narrowgauge.harness.running.worker import Settings, backend_in_host
    from narrowgauge.harness.tools.show import show_case

    if at and not re.fullmatch("[0-9]{1,18},[0-9]{1,18}", at):
        stop(f"--at is {at!r}; it is a row and a column: --at 3,17")
    row, _, column = at.partition(",")
    place = (int(row), int(column)) if at else None
    try:
        settings = Settings(
            backend, device, timeout=timeout, schedules=shuffles, sanitize=sanitize, untrusted=untrusted
        )
        with backend_in_host(settings) as loaded:
            passed = show_case(
                case, loaded, device=device, seed=seed, source=source, place=place,
                saved=failure.inputs if failure else None, after=earlier, timeout=timeout, untrusted=untrusted,
            )  # fmt: skip
    except (BackendError, Unsupported) as error:
        stop(str(error))
    raise typer.Exit(0 if passed else 1)


def _cases(names: list[str], paths: list[Path] | None, source: Path | None, recipes: list[str] | None) -> list[Case]:
    """The cases with these ids: of the case files or captured tensors, else as the id says."""
    from narrowgauge.harness.cases.keys import nearest
    from narrowgauge.harness.cases.operations import OPERATIONS, case_from_id

    listed = {case.id: case for case in load_cases(paths, source, None, recipes)} if paths or source else {}
    cases = []
    for name in names:
        case = listed.get(name) or (None if source else case_from_id(name))
        if case is None:
            known = listed or {case.id: case for case in load_cases(None, None, None, None)}
            own = "" if name.partition("/")[0] in OPERATIONS else "; an operation of your own needs --operations"
            stop(f"no case is called {name!r}{nearest(name, known)}{own}")
        cases.append(case)
    return cases


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
