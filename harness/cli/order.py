"""`narrowgauge order`: find the order in which a GEMM adds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.harness.cli.options import Device, Seed, stop
from narrowgauge.harness.cli.selection import require_device

if TYPE_CHECKING:
    import torch

    from narrowgauge.harness.backends.backend import Backend
    from narrowgauge.harness.checks.order.masks import GemmFunction
    from narrowgauge.harness.checks.order.order import Order
    from narrowgauge.spec.recipes import Recipe

_SHAPE = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})x([1-9]\d{0,5})")

Shapes = Annotated[
    list[str] | None, typer.Option("--gemm", help="Shape MxKxN; may be given again (default: 128x512x128).")
]
Picture = Annotated[bool, typer.Option("--picture", help="Also the tree of additions.")]
Json = Annotated[bool, typer.Option("--json", help="A list of JSON objects, in place of the sentences.")]


def find_order(
    backend: Annotated[str, typer.Argument(metavar="BACKEND", help="native, reference, or package.module:Name.")],
    shapes: Shapes = None,
    name: Annotated[str, typer.Option("--recipe", help="Recipe of the operands, with 8-bit elements.")] = (
        "fp8-current-e4m3"
    ),
    device: Device = "cpu",
    seed: Seed = 0,
    picture: Picture = False,
    json: Json = False,
) -> None:
    """Say in which order and with how many bits the gemm of a backend adds, and the line that declares this order.

    Exit status 0 if the order of every shape predicts random products to the bit; 1 if not.
    """
    sizes = [shape_of(text) for text in shapes or ["128x512x128"]]
    require_device(device)
    from narrowgauge.harness.backends.backend import BackendError, Unsupported
    from narrowgauge.harness.backends.host import HostLost
    from narrowgauge.harness.checks.order.probe import accumulation_order
    from narrowgauge.harness.hosts.remote_host import hosted_backend
    from narrowgauge.spec.recipes import find_recipe

    try:
        recipe = find_recipe(name)
        dtype = _operand_dtype(recipe)
        with hosted_backend(backend, device, seconds=600.0 * len(sizes)) as loaded:
            function = _product_of(loaded, recipe)
            orders = [accumulation_order(function, *size, dtype=dtype, device=device, seed=seed) for size in sizes]
    except (BackendError, Unsupported, HostLost, ValueError) as error:
        stop(str(error))
    declared = [_declaration(order, recipe) for order in orders]
    if json:
        import json as form

        found = [order.as_json() | {"declares": value} for order, value in zip(orders, declared, strict=True)]
        typer.echo(form.dumps(found, indent=2))
    else:
        for order, value in zip(orders, declared, strict=True):
            typer.echo(str(order))
            if picture:
                typer.echo(order.picture())
            if value is not None:
                typer.echo(f'  declares = {{"gemm": "{value}"}}')
    raise typer.Exit(0 if all(order.confirmed for order in orders) else 1)


def _declaration(order: Order, recipe: Recipe) -> str | None:
    """The declaration of an order for a recipe, whose scales were 1; None if no declaration is known to be right.

    Chains of one block of scales are "blocks". With float32 block scales an order names the sum of a block, which the
    chains of the whole product do not tell.
    """
    from narrowgauge.spec.formats import FP32

    if recipe.spans_k:
        return order.declares
    if recipe.scale is FP32:
        return None
    found = order.slices
    split = order.declares is not None and order.declares.startswith("split-") and order.width == 1
    return "blocks" if split and found is not None and found.chain == recipe.block[1] else order.declares


def shape_of(text: str) -> tuple[int, int, int]:
    """(M, K, N) of "MxKxN". Ends the command for another text."""
    match = _SHAPE.fullmatch(text)
    if match is None:
        stop(f"--gemm is {text!r}; it is a shape MxKxN, such as 64x7168x512")
    rows, columns, others = map(int, match.groups())
    return rows, columns, others


def _operand_dtype(recipe: Recipe) -> torch.dtype:
    """The dtype of a recipe's elements. Raises ValueError for elements without the range of a mask."""
    import torch

    dtypes = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
    if recipe.element.name not in dtypes:
        raise ValueError(
            f"elements {recipe.element.name} of {recipe} cannot be probed; take a recipe with E4M3 or E5M2, such as "
            "fp8-current-e4m3 or mxfp8-e4m3"
        )
    return dtypes[recipe.element.name]


def _product_of(backend: Backend, recipe: Recipe) -> GemmFunction:
    """The gemm of a backend as a function of elements: every scale is 1, the output is float32."""
    import torch

    from narrowgauge.spec.formats import FP32
    from narrowgauge.spec.quantized import Quantized, scales_shape

    def operand(x: torch.Tensor) -> Quantized:
        rows, columns = x.shape
        shape = scales_shape((rows, columns), recipe)
        one = 1.0 if recipe.scale is FP32 else recipe.scale.values.index(1.0)
        dtype = torch.float32 if recipe.scale is FP32 else torch.uint8
        scales = torch.full(shape, one, dtype=dtype, device=x.device)
        return Quantized(x.view(torch.uint8), scales, None, recipe, (rows, columns))

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = backend.call("gemm", operand(a), operand(b), out_dtype=torch.float32)
        return result

    return product
