"""Tables: every record as Parquet and CSV, and counts per operation, recipe and dtype."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from narrowgauge.harness.records.record import NESTED, OUTCOMES, SCHEMA, Record, elements_compared, outcome

_FORMULA = frozenset("=+-@\t\r\n＝＋－＠")
"""First characters of a cell that a spreadsheet evaluates as a formula, also in full-width characters."""


_KINDS = {column.name: str(column.type).removesuffix(" | None") for column in fields(Record)}
"""Type of each column of a record."""
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
    # Spreadsheets show no lists, and the findings of 2 000 failures are 40 MB.
    in_csv = [name for name in _KINDS if name not in NESTED]
    with (
        (directory / "records.csv").open("w", encoding="utf-8", newline="") as file,
        _parquet_writer(directory / "records.parquet") as add,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["schema", *in_csv])
        for start in range(0, max(1, len(rows)), _ROWS):
            part = rows[start : start + _ROWS]
            values = zip(*map(itemgetter(*_KINDS), part), strict=True) if part else [()] * len(_KINDS)
            columns = dict(zip(_KINDS, values, strict=True))
            add(columns)
            cells = [_cells(columns[name], _KINDS[name]) for name in in_csv]
            writer.writerows(zip([SCHEMA] * len(part), *cells, strict=True))


def _cells(values: Sequence[Any], kind: str) -> Sequence[Any]:
    """Cells of a column. A cell of None is empty."""
    if kind == "str":
        return [f"'{value}" if value[:1] in _FORMULA else value for value in values]
    return [value if value == value else None for value in values] if kind == "float" else values  # noqa: PLR0124 (NaN)


@contextmanager
def _parquet_writer(path: Path) -> Iterator[Callable[[Mapping[str, Sequence[Any]]], None]]:
    """A function that writes values of all columns into a new file."""
    import pyarrow
    import pyarrow.parquet

    pa: Any = pyarrow  # pyarrow has no type annotations
    # Explicit types: a table without rows has the same columns.
    types = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    kinds = {"schema": pa.int64()} | {name: types.get(kind, pa.string()) for name, kind in _KINDS.items()}
    schema = pa.schema(kinds, {"narrowgauge_schema": str(SCHEMA)})

    from narrowgauge.harness.records.json_line import (
        findings_json,
        stages_json,
    )  # needs msgspec, which `check` does not

    to_json: dict[str, Callable[[Any], str]] = {"stages": stages_json, "findings": findings_json}

    def add(columns: Mapping[str, Sequence[Any]]) -> None:
        count = len(columns["case"])
        texts = {name: _json(columns[name], to_json.get(name, json.dumps)) for name in NESTED}
        values: dict[str, Sequence[Any]] = {"schema": [SCHEMA] * count, **columns, **texts}
        arrays = [_array(values[name], kind) for name, kind in kinds.items()]
        writer.write_table(pa.Table.from_arrays(arrays, schema=schema))

    with pa.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        yield add


def _json(values: Iterable[Any], text: Callable[[Any], str]) -> list[str]:
    return [text(value) if value else "[]" for value in values]


def _array(values: Sequence[Any], kind: Any) -> Any:
    """`pyarrow.array(values, kind, from_pandas=True)`, NaN is null, without the import of pandas: half a second."""
    import numpy
    import pyarrow

    pa: Any = pyarrow
    if kind == pa.string():
        text = "".join(values)
        sizes = map(len, values if text.isascii() else [value.encode() for value in values])
        ends = numpy.cumsum([0, *sizes], dtype=numpy.int32)
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(ends), pa.py_buffer(text.encode())])
    if kind == pa.float64():
        numbers = numpy.array(values, dtype=numpy.float64)  # None is NaN
        valid = ~numpy.isnan(numbers)
        content = numpy.where(valid, numbers, 0).tobytes()
    else:
        valid = numpy.array([value is not None for value in values], dtype=bool)
        whole = [value or 0 for value in values]
        bits = numpy.packbits(numpy.array(whole, dtype=bool), bitorder="little")
        content = (bits if kind == pa.bool_() else numpy.array(whole, dtype=numpy.int64)).tobytes()
    present = numpy.packbits(valid, bitorder="little").tobytes()
    return pa.Array.from_buffers(kind, len(values), [pa.py_buffer(present), pa.py_buffer(content)])


def summary(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Counts and worst figures for each operation, recipe and dtype, sorted. A figure that was not measured is None."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["operation"], record["recipe"], record["dtype"]), []).append(record)
    return [_summary(key, groups[key]) for key in sorted(groups)]


def _summary(key: tuple[str, ...], members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    outcomes = [outcome(record) for record in members]

    def of(figure: Callable[[list[Any]], Any], name: str) -> Any:
        values = [
            value
            for record in members
            if (value := record[name]) is not None and value == value  # noqa: PLR0124 (NaN)
        ]
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
