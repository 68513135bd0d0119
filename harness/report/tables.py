"""Tables: every record as Parquet and CSV, and counts per operation, recipe and dtype."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.records.record import NESTED, OUTCOMES, SCHEMA, summarize, to_frame

if TYPE_CHECKING:
    import pandas as pd


def write(records: Iterable[dict[str, Any]], directory: Path) -> None:
    """Write `records.parquet` and `records.csv`: one row a record, the columns of reports/SCHEMA.md.

    The first column is the schema's version, which the Parquet file's metadata say too (`narrowgauge_schema`). A figure
    that was not measured is null in the one and empty in the other. The columns that hold lists are in Parquet alone.
    """
    frame = to_frame(records)
    frame.insert(0, "schema", SCHEMA)
    _write_parquet(frame, directory / "records.parquet")
    # A spreadsheet shows no list, and the findings of 2 000 failures are 40 MB of them.
    frame.drop(columns=list(NESTED)).to_csv(directory / "records.csv", index=False)


def _write_parquet(frame: pd.DataFrame, path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pa: Any = pyarrow  # it has no types
    # Stated, because pandas 2 and 3 infer different string types, and none at all for a table without rows.
    types = {"int64": pa.int64(), "Int64": pa.int64(), "float64": pa.float64(), "boolean": pa.bool_()}
    schema = pa.schema([(name, types.get(str(dtype), pa.string())) for name, dtype in frame.dtypes.items()])
    table = pa.Table.from_pandas(frame, schema=schema, preserve_index=False)
    table = table.replace_schema_metadata({**table.schema.metadata, "narrowgauge_schema": str(SCHEMA)})
    pa.parquet.write_table(table, path, compression="zstd")


def summary(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `harness.records.record.summarize` as plain values, None where nothing was measured."""
    table = summarize(records).astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    return [{str(column): value for column, value in row.items()} for row in rows]


def folded(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The rows of `summary`; where there are more than `most`, those that passed are one an operation and family.

    A family is what the names of recipes begin with: nvfp4, mxfp8, fp8-block. Rows that did not all pass stay as they
    are, and before the rest. `mxfp8 (12)` stands for 12 recipes, `(3)` for as many dtypes.
    """
    if len(rows) <= most:
        return rows
    families: dict[tuple[str, str], list[dict[str, Any]]] = {}
    kept = [row for row in rows if row["pass"] != row["cases"]]
    for row in rows:
        if row["pass"] == row["cases"]:
            families.setdefault((row["operation"], family(row["recipe"])), []).append(row)
    return kept + [_fold(members, family) for (_, family), members in families.items()]


def family(recipe: str) -> str:
    """What the name of a recipe begins with: nvfp4, mxfp8, fp8-block; the name itself of any other."""
    found = re.match(r"nvfp4|mxfp\d|fp8-[a-z]+", recipe)
    return found[0] if found else recipe


def _fold(rows: list[dict[str, Any]], family: str) -> dict[str, Any]:
    if len(rows) == 1:
        return rows[0]
    joined = dict(rows[0])
    for name in ("cases", *OUTCOMES, "compared", "mismatches", "seconds"):
        joined[name] = sum(row[name] or 0 for row in rows)
    for name in ("max_ulp", "budget_max"):
        joined[name] = max((row[name] for row in rows if row[name] is not None), default=None)
    for name, shared in (("recipe", family), ("dtype", "")):
        values = {row[name] for row in rows}
        joined[name] = values.pop() if len(values) == 1 else f"{shared} ({len(values)})".lstrip()
    return joined
