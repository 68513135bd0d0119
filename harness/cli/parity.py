"""`narrowgauge parity`: whether backends give equal bytes."""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from narrowgauge.harness.cli.options import (
    BACKEND_HELP,
    Contracts,
    Device,
    Rules,
    Seed,
    backend_name,
    divided,
    sizes_of,
    stop,
)
from narrowgauge.harness.cli.selection import require_device

if TYPE_CHECKING:
    from narrowgauge.harness.cases.case import Case


class Form(StrEnum):
    """Forms of the result."""

    TABLE = "table"
    JSON = "json"
    HTML = "html"


def _listed(name: str, what: str) -> Any:
    return typer.Option(name, callback=divided, help=f"{what}; may be given again, or with commas.")


def compare_backends(
    backends: Annotated[
        list[str],
        typer.Argument(
            metavar="BACKENDS",
            callback=lambda names: list(map(backend_name, names)),
            help=f"Two or more, each {BACKEND_HELP}",
        ),
    ],
    recipes: Annotated[
        list[str] | None, _listed("--recipe", "Recipe (default: nvfp4, or that of the contract)")
    ] = None,
    operation: Annotated[str, typer.Option("--operation", help="quantize, gemm, or a contract of the package.")] = "",
    contract: Contracts = None,
    families: Annotated[list[str] | None, _listed("--family", "Input family (default: all)")] = None,
    shapes: Annotated[list[str] | None, _listed("--shape", "Shape, such as 128x256 (default: some)")] = None,
    device: Device = "cpu",
    seed: Seed = 0,
    form: Annotated[Form, typer.Option("--format", help="Form of the result.")] = Form.TABLE,
    rules: Rules = None,
) -> None:
    """Say if backends give equal bytes, or where they differ.

    They run on all input families, shapes and dtypes of an operation. Of a product they get equal operands. Exit status
    0 if all bytes of all backends are equal, 1 if not, 2 if nothing could be compared.
    """
    if len(backends) < 2:
        stop(f"BACKENDS is {backends[0]!r} alone; give two or more")
    require_device(device)
    sizes = sizes_of(shapes)
    import json

    from narrowgauge.harness.backends.backend import BackendError
    from narrowgauge.harness.backends.host import HostLost
    from narrowgauge.harness.cases.operations import OperationError
    from narrowgauge.harness.hosts.remote_host import hosted_backend
    from narrowgauge.harness.machine.process import one_thread
    from narrowgauge.harness.tools.dialect.parity import report
    from narrowgauge.harness.tools.dialect.parity.parity import Kernel, only, pairs, subject_of

    names = _short(backends)
    found = []
    try:
        subjects = _subjects(operation, contract, recipes, {"families": families, "shapes": sizes})
        with one_thread(), ExitStack() as hosts:
            loaded = [hosts.enter_context(hosted_backend(name, device)) for name in backends]
            for kind, cases in subjects:
                kernels = [
                    Kernel(name, only(backend, cases), cases, device, seed)
                    for name, backend in zip(names, loaded, strict=True)
                ]
                found.append(pairs(kernels, subject_of(kind, cases)))
    except (BackendError, HostLost, OperationError, ValueError, TypeError) as error:
        stop(str(error))
    if form is Form.JSON:
        typer.echo(json.dumps([report.as_json(each) for each in found], indent=2))
    else:
        typer.echo("\n\n".join((report.text if form is Form.TABLE else report.page)(each) for each in found))
    if not any(pair.found.elements for each in found for pair in each):
        stop("nothing was compared: no case ran on two backends, as the messages above say")
    raise typer.Exit(0 if all(pair for each in found for pair in each) else 1)


def _short(backends: list[str]) -> list[str]:
    """The names of backends: of the class alone if that tells them apart, with a number for a backend given twice."""
    short = [name.rpartition(":")[2] for name in backends]
    names = short if len(set(short)) == len(set(backends)) else backends
    return [name if names.count(name) == 1 else f"{name} ({at})" for at, name in enumerate(names, 1)]


def _subjects(
    operation: str, files: list[Path] | None, recipes: list[str] | None, chosen: dict[str, Any]
) -> list[tuple[str, list[tuple[Case, bool]]]]:
    """Operations with their cases. Raises OperationError, ValueError and TypeError."""
    import torch

    from narrowgauge.contracts import CONTRACTS
    from narrowgauge.harness.api.check import selected_cases
    from narrowgauge.harness.cases.contracts.case import recipes_of
    from narrowgauge.harness.cases.operations import contracts_in

    if files:
        classes = [cls for file in files for cls in contracts_in(file)]
        return [
            (cls.operation, cls.usual(names, **chosen)) for cls, names in recipes_of(classes, recipes or []).items()
        ]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    more = chosen | {"dtypes": dtypes, "keys": {}}
    found = []
    subject = operation if operation in CONTRACTS else None
    for recipe in recipes or ["" if subject else "nvfp4"]:
        _, kind, cases = selected_cases(subject, recipe or None, operation or None, more)
        found.append((kind, cases))
    return found
