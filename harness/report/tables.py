"""Tables: every record as Parquet and CSV, and counts per operation, recipe and dtype."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.record import SCHEMA, summarize, to_frame

if TYPE_CHECKING:
    import pandas as pd


def write(records: Iterable[dict[str, Any]], directory: Path) -> None:
    """Write `records.parquet` and `records.csv`: one row a record, the columns of `Record`.

    The Parquet file's metadata says the schema's version (`narrowgauge_schema`). A figure that was not measured is
    null in the one and empty in the other.
    """
    frame = to_frame(records)
    _write_parquet(frame, directory / "records.parquet")
    frame.to_csv(directory / "records.csv", index=False)


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
    """The rows of `harness.record.summarize` as plain values, None where nothing was measured."""
    table = summarize(records).astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    return [{str(column): value for column, value in row.items()} for row in rows]
