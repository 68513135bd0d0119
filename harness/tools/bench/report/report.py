"""Files of a bench: a page with the roofline, and the rows as Parquet and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from narrowgauge.harness.report.page import template
from narrowgauge.harness.report.replace_files import replace_files
from narrowgauge.harness.tools.bench.bench import Bench
from narrowgauge.harness.tools.bench.bench_row import COLUMNS, SCHEMA, BenchRow
from narrowgauge.harness.tools.bench.cost_growth import CostCurve
from narrowgauge.harness.tools.bench.report import cells, figures

PAGE = "index.html"


def write(bench: Bench, growths: list[CostCurve], environment: dict[str, str], directory: Path) -> Path:
    """Write `index.html` and `bench.json`, and `bench.parquet` if there are rows. Returns the page's path.

    A `bench.parquet` of an earlier bench is removed if this bench has no rows.
    """
    with replace_files(directory, last=PAGE) as fresh:
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


def _write_parquet(rows: list[BenchRow], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pa: Any = pyarrow  # pyarrow has no type annotations
    kinds = {"str": pa.string(), "int": pa.int64(), "float | None": pa.float64(), "bool | None": pa.bool_()}
    types = {name: kinds[str(kind)] for name, kind in BenchRow.__annotations__.items()}
    types |= {"schema": pa.int64(), "id": pa.string(), "rate": pa.float64()}
    schema = pa.schema([(name, types[name]) for name in COLUMNS])
    table = pa.Table.from_pylist([row.to_dict() for row in rows], schema=schema)
    table = table.replace_schema_metadata({"narrowgauge_bench_schema": str(SCHEMA)})
    pa.parquet.write_table(table, path, compression="zstd")


def verdict_of(bench: Bench, growths: list[CostCurve]) -> str:
    """`pass`, or `fail` if an output is wrong or nothing was judged."""
    judged = bench.right if bench.rows or not growths else True
    grown = any(growth.points for growth in growths) if growths else True
    return "pass" if judged and grown and not any(growth.wrong for growth in growths) else "fail"


def sentence(bench: Bench, growths: list[CostCurve]) -> str:
    """The bench as a sentence."""
    parts = [cells.sentence(bench.rows)] if bench.rows or not growths else []
    if growths:
        largest = max((point.exponent for growth in growths for point in growth.points), default=None)
        parts.append("no size was measured" if largest is None else f"cost measured to 2^{largest} elements")
        parts += [f"{growth.who}: {growth.ended}" for growth in growths if growth.wrong]
    return "; ".join(parts)


def render(bench: Bench, growths: list[CostCurve], environment: dict[str, str]) -> str:
    """The page. Text from rows and the environment is escaped."""
    roofs = figures.roofline(bench.rows)
    numbers = {mark.row: number for number, mark in enumerate(roofs.marks, 1)} if roofs else {}
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
        rows=[(row, numbers.get(row.id, ""), cells.cells(row)) for row in bench.rows],
        wrong=cells.wrong(bench.rows),
        notes=sorted(bench.notes.items()),
        grown=[growth.sentence() for growth in growths],
    )
