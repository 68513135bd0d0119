"""Tables: every record as Parquet and CSV, and counts per operation, recipe and dtype."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.records.record import NESTED, OUTCOMES, SCHEMA, Record, summarize, to_frame

if TYPE_CHECKING:
    import pandas as pd


TEXT = tuple(column.name for column in fields(Record) if column.type == "str")
"""Columns with text."""
_FORMULA = re.compile(r"[=+\-@\t\r\n＝＋－＠]")
"""Start of a cell that a spreadsheet evaluates as a formula, also in full-width characters."""


def write(records: Iterable[dict[str, Any]], directory: Path) -> None:
    """Write `records.parquet` and `records.csv`: a row for each record, with the columns of docs/schema.md.

    The first column is the schema's version, which is also in the metadata of the Parquet file (`narrowgauge_schema`).
    A figure that was not measured is null in Parquet and empty in CSV. Columns with lists are written to Parquet only.
    In CSV an apostrophe precedes text that a spreadsheet would evaluate as a formula.
    """
    frame = to_frame(records)
    frame.insert(0, "schema", SCHEMA)
    _write_parquet(frame, directory / "records.parquet")
    # Spreadsheets show no lists, and the findings of 2 000 failures are 40 MB.
    flat = frame.drop(columns=list(NESTED))
    for name in TEXT:
        flat[name] = [f"'{cell}" if _FORMULA.match(cell) else cell for cell in flat[name]]
    flat.to_csv(directory / "records.csv", index=False)


def _write_parquet(frame: pd.DataFrame, path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pa: Any = pyarrow  # pyarrow has no type annotations
    # Explicit types, because pandas 2 and 3 infer different string types, and no types for a table without rows.
    types = {"int64": pa.int64(), "Int64": pa.int64(), "float64": pa.float64(), "boolean": pa.bool_()}
    schema = pa.schema([(name, types.get(str(dtype), pa.string())) for name, dtype in frame.dtypes.items()])
    table = pa.Table.from_pandas(frame, schema=schema, preserve_index=False)
    table = table.replace_schema_metadata({**table.schema.metadata, "narrowgauge_schema": str(SCHEMA)})
    pa.parquet.write_table(table, path, compression="zstd")


def summary(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `harness.records.record.summarize` as plain values, with None for figures that were not measured."""
    table = summarize(records).astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    return [{str(column): value for column, value in row.items()} for row in rows]


def fold_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `summary`, folded to a row for each operation: operations with failures first.

    `mxfp8 (12 recipes)` stands for the recipes of a family, and `54 recipes` for recipes of several families. A family
    is the beginning of a recipe's name: nvfp4, mxfp8, fp8-block. The dtype is empty if it differs.
    """
    operations: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        operations.setdefault(row["operation"], []).append(row)
    folded = [_fold(members) for members in operations.values()]
    return sorted(folded, key=lambda row: row["pass"] == row["cases"])


def recipe_family(recipe: str) -> str:
    """Beginning of a recipe's name: nvfp4, mxfp8, fp8-block, NVFP4BlockScaling. The whole name of a recipe without a
    family."""
    match = re.match(r"nvfp4|mxfp\d|fp8-[a-z]+|\w+Scaling\b", recipe)
    return match[0] if match else recipe


def _fold(rows: list[dict[str, Any]]) -> dict[str, Any]:
    joined = dict(rows[0])
    for name in ("cases", *OUTCOMES, "compared", "mismatches", "seconds"):
        joined[name] = sum(row[name] or 0 for row in rows)
    for name in ("max_ulp", "budget_max"):
        joined[name] = max((row[name] for row in rows if row[name] is not None), default=None)
    recipes, dtypes = ({row[name] for row in rows} for name in ("recipe", "dtype"))
    if len(recipes) > 1:
        families = {recipe_family(recipe) for recipe in recipes}
        count = f"{len(recipes)} recipes"
        joined["recipe"] = f"{families.pop()} ({count})" if len(families) == 1 else count
    joined["dtype"] = dtypes.pop() if len(dtypes) == 1 else ""
    return joined
