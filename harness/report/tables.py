"""Tables: every record as Parquet and CSV, and counts per operation, recipe and dtype."""

from __future__ import annotations

import csv
import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

from narrowgauge.harness.records.record import NESTED, OUTCOMES, SCHEMA, Record, elements_compared, outcome

_FORMULA = re.compile(r"[=+\-@\t\r\n＝＋－＠]")
"""Start of a cell that a spreadsheet evaluates as a formula, also in full-width characters."""


_ROWS = 4096
"""Rows that are converted at once: the texts of a part have less than 2 GiB."""


def write(records: Iterable[dict[str, Any]], directory: Path) -> None:
    """Write `records.parquet` and `records.csv`: a row for each record, with the columns of docs/schema.md, sorted by
    case and backend.

    The first column is the schema's version, which is also in the metadata of the Parquet file (`narrowgauge_schema`).
    A figure that was not measured or is NaN is null in Parquet and empty in CSV. Columns with lists are written to
    Parquet only. In CSV an apostrophe precedes text that a spreadsheet would evaluate as a formula.
    """
    rows = sorted(records, key=lambda record: (record["case"], record["backend"]))
    _write_parquet(rows, directory / "records.parquet")
    # Spreadsheets show no lists, and the findings of 2 000 failures are 40 MB.
    names = [column.name for column in fields(Record) if column.name not in NESTED]
    with (directory / "records.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["schema", *names])
        writer.writerows([SCHEMA, *(_cell(row[name]) for name in names)] for row in rows)


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return f"'{value}" if _FORMULA.match(value) else value
    return value if _measured(value) else ""


def _measured(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pa: Any = pyarrow  # pyarrow has no type annotations
    # Explicit types: a table without rows has the same columns.
    types = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    kinds = {c.name: types.get(str(c.type).removesuffix(" | None"), pa.string()) for c in fields(Record)}
    metadata = {"narrowgauge_schema": str(SCHEMA)}
    schema = pa.schema({"schema": pa.int64()} | kinds, metadata)
    with pa.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, max(1, len(rows)), _ROWS):
            part = rows[start : start + _ROWS]
            arrays = [_array([SCHEMA] * len(part), pa.int64())]
            for name, kind in kinds.items():
                values = [row[name] for row in part]
                arrays.append(_array([json.dumps(value) for value in values] if name in NESTED else values, kind))
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _array(values: Sequence[Any], kind: Any) -> Any:
    """`pyarrow.array(values, kind, from_pandas=True)`, NaN is null, without the import of pandas: half a second."""
    import numpy
    import pyarrow

    pa: Any = pyarrow
    valid = [_measured(value) for value in values]
    if kind == pa.string():
        texts = [value.encode() if measured else b"" for value, measured in zip(values, valid, strict=True)]
        ends = numpy.cumsum([0, *map(len, texts)], dtype=numpy.int32)
        content = [ends.tobytes(), b"".join(texts)]
    elif kind == pa.bool_():
        content = [numpy.packbits(numpy.array(values, dtype=bool), bitorder="little").tobytes()]
    else:
        numbers = [value if measured else 0 for value, measured in zip(values, valid, strict=True)]
        content = [array("q" if kind == pa.int64() else "d", numbers).tobytes()]
    bits = numpy.packbits(numpy.array(valid, dtype=bool), bitorder="little").tobytes()
    return pa.Array.from_buffers(kind, len(values), [pa.py_buffer(part) for part in (bits, *content)])


def summary(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Counts and worst figures for each operation, recipe and dtype, sorted. A figure that was not measured is None."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["operation"], record["recipe"], record["dtype"]), []).append(record)
    return [_summary(key, groups[key]) for key in sorted(groups)]


def _summary(key: tuple[str, ...], members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    outcomes = [outcome(record) for record in members]

    def of(figure: Callable[[list[Any]], Any], name: str) -> Any:
        values = [record[name] for record in members if _measured(record[name])]
        return figure(values) if values else None

    return {
        **dict(zip(("operation", "recipe", "dtype"), key, strict=True)),
        "cases": len(members),
        **{name: outcomes.count(name) for name in OUTCOMES},
        "compared": sum(map(elements_compared, members)),
        "mismatches": of(sum, "mismatches"),
        "max_ulp": of(max, "max_ulp"),
        "exact_share": of(fmean, "exact_share"),
        "ordered_share": of(fmean, "ordered_share"),
        "budget_max": of(max, "budget_max"),
        "seconds": of(sum, "seconds"),
    }


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
