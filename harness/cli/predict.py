"""`narrowgauge predict`: the expected bits of a product on a GPU that is not at hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.harness.cli.options import Seed, stop
from narrowgauge.harness.cli.order import shape_of

if TYPE_CHECKING:
    import torch

Hardware = Annotated[str, typer.Option("--hardware", help="Hardware model, such as blackwell-nvfp4 or hopper-fp8.")]
Shape = Annotated[str, typer.Option("--shape", help="Shape MxKxN.")]
Operands = Annotated[
    str, typer.Option("--operands", help="Formats of a and b: e5m2,e4m3 (default: the first of the model, twice).")
]
Input = Annotated[
    Path | None, typer.Option("--input", help="A .safetensors file with the operands, in place of an input family.")
]
Save = Annotated[Path | None, typer.Option("--save", help="Write operands and expected y to this .safetensors file.")]
Compare = Annotated[
    Path | None, typer.Option("--compare", help="A .safetensors file with the y of the GPU: compare it bit for bit.")
]


def predict(
    hardware: Hardware,
    shape: Shape,
    operands: Operands = "",
    family: Annotated[str, typer.Option("--family", help="Input family of the operands.")] = "normal",
    seed: Seed = 0,
    given: Input = None,
    promoted: Annotated[int, typer.Option("--promoted", min=0, help="Promote every P columns; 0: never.")] = 0,
    splits: Annotated[int, typer.Option("--splits", min=1, help="Slices of K, added in order.")] = 1,
    save: Save = None,
    compare: Compare = None,
) -> None:
    """Predict the bits of a product on a GPU that is not at hand.

    The product is a·bᵀ; --compare compares it with the result of the GPU. Exit status 0; with --compare 1 if a bit
    differs.
    """
    rows, columns, others = shape_of(shape)
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    from narrowgauge.harness.api.predict import differences, digest, drawn_operands, predicted_product
    from narrowgauge.reference.accumulators.hardware import find_hardware
    from narrowgauge.reference.accumulators.product import Composition

    try:
        model = find_hardware(hardware)
        names = (operands.split(",") if operands else [model.operands[0]]) * 2
        formats = names[0], names[1]
        size = rows, columns, others
        tensors = drawn_operands(model, formats, size, family, seed) if given is None else load_file(given)
        y = predicted_product(model, formats, tensors, columns, Composition(promoted=promoted or None, splits=splits))
        if y.shape != (rows, others):
            raise ValueError(f"{given} has the product of {len(y)} by {y.shape[1]} rows; --shape is {shape}")
        found = None if compare is None else load_file(compare)
        if found is not None and "y" not in found:
            raise ValueError(f"{compare} has no tensor y")
        wrong = [] if found is None else differences(y, found["y"])
    except (ValueError, TypeError, OSError, SafetensorError) as error:
        stop(str(error))
    dtype = str(y.dtype).removeprefix("torch.")
    typer.echo(f"{model.name} {rows}×{columns}×{others}: y {dtype}, sha256 {digest(y)}")
    typer.echo(f"  model: {model.source}; run on: {model.run}")
    if save is not None:
        source = {} if given else {"inputs": family, "seed": str(seed)}
        facts = {"hardware": model.name, "operands": ",".join(formats), "sha256": digest(y), **source}
        save_file({**tensors, "y": y}, save, metadata=facts | {"promoted": str(promoted), "splits": str(splits)})
        typer.echo(f"  {save}: {', '.join([*tensors, 'y'])}")
    if found is not None:
        typer.echo(f"  {compare}: {_difference(y, found['y'], wrong)}")
    raise typer.Exit(1 if wrong else 0)


def _difference(expected: torch.Tensor, found: torch.Tensor, wrong: list[tuple[int, int]]) -> str:
    if not wrong:
        return f"all {found.numel()} outputs have the predicted bits"
    row, column = wrong[0]
    here = float(expected.to(found.dtype)[row, column]), float(found[row, column])
    return (
        f"{len(wrong)} of {found.numel()} outputs differ, the first at row {row}, column {column}: predicted "
        f"{here[0].hex()}, found {here[1].hex()}"
    )
