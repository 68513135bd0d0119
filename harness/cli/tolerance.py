"""`narrowgauge tolerance`: the error and the tolerance to expect of a GEMM."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from narrowgauge.harness.cli.options import Seed, Shapes, divided, stop

if TYPE_CHECKING:
    from narrowgauge.harness.api.error_figures.tolerance import Tolerance


class Form(StrEnum):
    """Forms of the result."""

    TABLE = "table"
    MARKDOWN = "markdown"
    CSV = "csv"
    JSON = "json"
    HTML = "html"


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_HEADER = ("inputs", "order", "SQNR", "exact", "ulp", "rtol", "atol", "TE", "vLLM")
_NOTE = (
    "SQNR: of the quantized product, in dB. exact: outputs with one correct value. ulp: median width of the proved "
    "interval. rtol, atol: what allclose needs alone. TE (8e-3), vLLM (0.1): the error in ulp that their tests accept, "
    "and in brackets the outputs at which they can refuse a correct kernel."
)


def _listed(name: str, what: str) -> Any:
    """An option with several values, and their default in the help."""
    return typer.Option(name, callback=divided, help=f"{what}; may be given again, or with commas.")


Recipes = Annotated[list[str] | None, _listed("--recipe", "Recipe (default: nvfp4,mxfp8-e4m3)")]
OutDtypes = Annotated[list[str] | None, _listed("--out-dtype", "Output dtype: bf16, fp16 or fp32 (default: bf16)")]
Families = Annotated[list[str] | None, _listed("--family", "Input family (default: normal,outliers)")]


def tolerance_table(
    shapes: Shapes = None,
    recipes: Recipes = None,
    out: OutDtypes = None,
    families: Families = None,
    order: Annotated[str, typer.Option("--order", help="A declared order, beside any order: aligned-13-32-128.")] = "",
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows of each operand that are evaluated.")] = 32,
    seed: Seed = 0,
    form: Annotated[Form, typer.Option("--format", help="Form of the result.")] = Form.TABLE,
) -> None:
    """Print the error and the tolerances to expect of a GEMM.

    These are the quantization error, the proved interval, and the rtol and atol that a correct kernel needs. Of
    --shape, the default is 128x4096x128.
    """
    dtypes = out or ["bf16"]
    if unknown := [name for name in dtypes if name not in _DTYPES]:
        stop(f"--out-dtype has {', '.join(unknown)}; there are {', '.join(_DTYPES)}")
    sizes = [_shape(text) for text in shapes or ["128x4096x128"]]
    import torch

    from narrowgauge.harness.api.error_figures.tolerance import tolerance

    try:
        found = [
            tolerance(
                size, recipe, out_dtype=getattr(torch, _DTYPES[dtype]), order=order or None, family=family, seed=seed,
                rows=rows,
            )
            for recipe in recipes or ["nvfp4", "mxfp8-e4m3"] for size in sizes for dtype in dtypes
            for family in families or ["normal", "outliers"]
        ]  # fmt: skip
    except (ValueError, TypeError) as error:
        stop(str(error))
    typer.echo(_text(found, form))


def _shape(text: str) -> tuple[int, ...]:
    """(M, K, N) of "MxKxN". Ends the command for another text."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        stop(f"--shape is {text!r}; it is a shape MxKxN, such as 4096x7168x512")
    return tuple(map(int, parts))


def _text(found: list[Tolerance], form: Form) -> str:
    if form is Form.JSON:
        import json

        return json.dumps([asdict(each) for each in found], indent=2)
    if form is Form.TABLE:
        return _tables(found)
    if form is Form.HTML:
        from narrowgauge.harness.api.error_figures.tolerance_page import render

        return render(found)
    import csv
    import io

    rows = _rows(found)
    if form is Form.CSV:
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().rstrip("\n")
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rows(found: list[Tolerance]) -> list[dict[str, Any]]:
    """A row for each result and order."""
    rows = []
    for each in found:
        facts = asdict(each)
        del facts["intervals"]
        facts |= {name: "x".join(map(str, facts[name])) for name in ("shape", "evaluated")}
        for interval in each.intervals:
            figures = asdict(interval)
            for library in figures.pop("libraries"):
                name = library.pop("library")
                figures |= {f"{name} {key}": value for key, value in library.items()}
            rows.append(facts | figures)
    return rows


def _tables(found: list[Tolerance]) -> str:
    """A table of at most 80 columns for each recipe, shape and dtype."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for each in found:
        shape, evaluated = ("×".join(map(str, size)) for size in (each.shape, each.evaluated))
        title = f"{each.recipe} {shape} {each.out_dtype}, {evaluated} outputs evaluated"
        for interval in each.intervals:
            tables.setdefault(title, []).append((
                each.family, "any" if interval.order == "any" else "given", f"{each.sqnr_db:.1f}",
                f"{interval.exact:.1%}", f"{interval.median_ulp}", f"{interval.rtol:.1e}", f"{interval.atol:.1e}",
                *(f"{each.ulp}{f' ({each.refused:.0%})' if each.refused else ''}" for each in interval.libraries),
            ))  # fmt: skip
    import textwrap

    parts = []
    for title, rows in tables.items():
        widths = [max(map(len, column)) for column in zip(_HEADER, *rows, strict=True)]
        cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (_HEADER, *rows)]
        parts.append("\n".join([title, *("  ".join(row).rstrip() for row in cells)]))
    return "\n\n".join([*parts, textwrap.fill(_NOTE, 80)])
