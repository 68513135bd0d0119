"""`narrowgauge power`: which known wrong results a comparison or a test accepts."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from narrowgauge.harness.cli.options import Seed, divided, sizes_of, stop
from narrowgauge.harness.power.compares import Compares


class Form(StrEnum):
    """Forms of the result."""

    TABLE = "table"
    JSON = "json"
    HTML = "html"


def power_of(
    judge: Annotated[
        str, typer.Argument(metavar="TEST", help="A comparison judge(actual, expected): folder/file.py::name.")
    ],
    recipe: Annotated[str, typer.Option("--recipe", help="Recipe of quantize, or of the contract.")] = "",
    contract: Annotated[str, typer.Option("--contract", help="A contract: its name, or folder/file.py:name.")] = "",
    families: Annotated[
        list[str] | None, typer.Option("--family", callback=divided, help="Input family (default: normal).")
    ] = None,
    shapes: Annotated[
        list[str] | None, typer.Option("--shape", callback=divided, help="Shape of the inputs, such as 64x256.")
    ] = None,
    seed: Seed = 0,
    compares: Annotated[Compares, typer.Option("--compares", help="What the comparison is given.")] = Compares.VALUES,
    in_place_of: Annotated[
        str, typer.Option("--in-place-of", help="TEST is a test; wrong results stand in place of module.function.")
    ] = "",
    form: Annotated[Form, typer.Option("--format", help="Form of the result.")] = Form.TABLE,
    details: Annotated[bool, typer.Option("--details", help="All mistakes, also those that are caught.")] = False,
) -> None:
    """Print which known wrong results a comparison or a test accepts.

    Exit status: 0 if the test catches every mistake that narrowgauge refuses, and accepts the right results; else 1.
    """
    from narrowgauge.harness.backends.backend import BackendError
    from narrowgauge.harness.backends.loading import load_implementation
    from narrowgauge.harness.cases.operations import OperationError
    from narrowgauge.harness.power.power import power
    from narrowgauge.spec.program import ContractError

    try:
        function = load_implementation(judge.replace("::", ":"))
        if not callable(function):
            stop(f"{judge} is no function; give folder/file.py::name of a comparison or of a test")
        subject = load_implementation(contract) if ".py:" in contract else contract or None
        found = power(
            function, subject, recipe=recipe or None, families=families or ["normal"], shapes=sizes_of(shapes),
            seed=seed, compares=compares.value, in_place_of=in_place_of or None,
        )  # fmt: skip
    except (BackendError, OperationError, ContractError, ValueError, TypeError) as error:
        stop(str(error))
    if form is Form.HTML:
        from narrowgauge.harness.power.page import page

        typer.echo(page(found))
    elif form is Form.JSON:
        typer.echo(json.dumps(found.to_dict()))
    else:
        typer.echo("\n\n".join([str(found), *[found.table] * details]))
    raise typer.Exit(0 if found.passed else 1)
