"""What a bench leaves: a page with the roofline, and its rows as Parquet and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from narrowgauge.harness.report.page import template
from narrowgauge.harness.report.replace_files import replacing
from narrowgauge.harness.tools.bench.bench import Bench
from narrowgauge.harness.tools.bench.growth import Growth
from narrowgauge.harness.tools.bench.report import cells, figures
from narrowgauge.harness.tools.bench.row import COLUMNS, SCHEMA, Row

PAGE = "index.html"


def write(bench: Bench, growths: list[Growth], environment: dict[str, str], directory: Path) -> Path:
    """Write `index.html`, and `bench.parquet` and `bench.json` where there are rows; return the page's path.

    Files of an earlier bench that this one has not are removed.
    """
    with replacing(directory, last=PAGE) as fresh:
        if bench.rows:
            _write_parquet(bench.rows, fresh / "bench.parquet")
        content = {
            "schema": SCHEMA,
            "environment": environment,
            "rows": [row.to_dict() for row in bench.rows],
            "notes": bench.notes,
            "growth": [{**asdict(growth), "sentence": growth.sentence()} for growth in growths],
        }
        (fresh / "bench.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (fresh / PAGE).write_text(render(bench, growths, environment), encoding="utf-8")
    if not bench.rows:
        (directory / "bench.parquet").unlink(missing_ok=True)
    return directory / PAGE


def _write_parquet(rows: list[Row], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pa: Any = pyarrow  # it has no types
    kinds = {"str": pa.string(), "int": pa.int64(), "float | None": pa.float64(), "bool | None": pa.bool_()}
    types = {name: kinds[str(kind)] for name, kind in Row.__annotations__.items()}
    types |= {"schema": pa.int64(), "id": pa.string(), "rate": pa.float64()}
    schema = pa.schema([(name, types[name]) for name in COLUMNS])
    table = pa.Table.from_pylist([row.to_dict() for row in rows], schema=schema)
    table = table.replace_schema_metadata({"narrowgauge_bench_schema": str(SCHEMA)})
    pa.parquet.write_table(table, path, compression="zstd")


def verdict_of(bench: Bench, growths: list[Growth]) -> str:
    """`pass`, or `fail` where anything is wrong or nothing was judged."""
    judged = bench.right if bench.rows or not growths else True
    grown = any(growth.points for growth in growths) if growths else True
    return "pass" if judged and grown and not any(growth.wrong for growth in growths) else "fail"


def sentence(bench: Bench, growths: list[Growth]) -> str:
    """A bench in one sentence."""
    parts = [cells.sentence(bench.rows)] if bench.rows or not growths else []
    if growths:
        largest = max((point.exponent for growth in growths for point in growth.points), default=None)
        parts.append("no size was measured" if largest is None else f"cost measured to 2^{largest} elements")
        parts += [f"{growth.who}: {growth.ended}" for growth in growths if growth.wrong]
    return "; ".join(parts)


def render(bench: Bench, growths: list[Growth], environment: dict[str, str]) -> str:
    """The page. Everything that is not of this file is escaped."""
    roofs = figures.roofline(bench.rows)
    return template.render(
        Path(__file__).with_name("bench.html"),
        name="narrowgauge bench",
        verdict=verdict_of(bench, growths),
        sentence=sentence(bench, growths),
        environment=environment,
        figures=([roofs] if roofs else []) + figures.growths(growths),
        width=figures.WIDTH,
        height=figures.HEIGHT,
        columns=cells.COLUMNS,
        explained=cells.EXPLAINED,
        rows=[(row, cells.cells(row)) for row in bench.rows],
        missed=cells.missed(bench.rows),
        wrong=cells.wrong(bench.rows),
        notes=sorted(bench.notes.items()),
        grown=[growth.sentence() for growth in growths],
    )
