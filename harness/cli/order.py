"""`narrowgauge order`: find the order in which a GEMM adds."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import typer

from narrowgauge.harness.cli.options import BackendArgument, Device, Seed, Shapes, stop
from narrowgauge.harness.cli.selection import require_device

_SHAPE = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})x([1-9]\d{0,5})")

Picture = Annotated[bool, typer.Option("--picture", help="Also the tree of additions.")]


class Form(StrEnum):
    """Forms of the result."""

    TEXT = "text"
    JSON = "json"


Format = Annotated[Form, typer.Option("--format", help="Form of the result; json: a list of objects.")]


def find_order(
    backend: BackendArgument,
    shapes: Shapes = None,
    name: Annotated[str, typer.Option("--recipe", help="Recipe of the operands, with 8-bit elements.")] = (
        "fp8-current-e4m3"
    ),
    device: Device = "cpu",
    seed: Seed = 0,
    picture: Picture = False,
    form: Format = Form.TEXT,
) -> None:
    """Find in which order and with how many bits a GEMM adds.

    Of --shape, the default is 128x512x128. Prints the line that declares the order too. Exit status 0 if the order of
    every shape predicts random products to the bit; 1 if not.
    """
    sizes = [shape_of(text) for text in shapes or ["128x512x128"]]
    require_device(device)
    from narrowgauge.harness.backends.backend import BackendError, Unsupported
    from narrowgauge.harness.backends.host import HostLost
    from narrowgauge.harness.checks.order.probe import accumulation_order
    from narrowgauge.harness.hosts.remote_host import hosted_backend
    from narrowgauge.harness.operations.gemm.probed_gemm import declaration_for, operand_dtype, product_of
    from narrowgauge.spec.recipes import find_recipe

    try:
        recipe = find_recipe(name)
        dtype = operand_dtype(recipe)
        with hosted_backend(backend, device, seconds=600.0 * len(sizes)) as loaded:
            function = product_of(loaded, recipe)
            orders = [accumulation_order(function, *size, dtype=dtype, device=device, seed=seed) for size in sizes]
    except (BackendError, Unsupported, HostLost, ValueError) as error:
        stop(str(error))
    declared = [declaration_for(order, recipe) for order in orders]
    if form is Form.JSON:
        import json

        found = [order.as_json() | {"declares": value} for order, value in zip(orders, declared, strict=True)]
        typer.echo(json.dumps(found, indent=2))
    else:
        for order, value in zip(orders, declared, strict=True):
            typer.echo(str(order))
            if picture:
                typer.echo(order.picture())
            if value is not None:
                typer.echo(f'  declares = {{"gemm": "{value}"}}')
    raise typer.Exit(0 if all(order.confirmed for order in orders) else 1)


def shape_of(text: str) -> tuple[int, int, int]:
    """(M, K, N) of "MxKxN". Ends the command for another text."""
    match = _SHAPE.fullmatch(text)
    if match is None:
        stop(f"--shape is {text!r}; it is a shape MxKxN, such as 64x7168x512")
    rows, columns, others = map(int, match.groups())
    return rows, columns, others
