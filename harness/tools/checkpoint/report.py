"""Report of a checkpoint: terminal, page and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.report import text
from narrowgauge.harness.report.page import template
from narrowgauge.harness.report.replace_files import replace_files
from narrowgauge.harness.tools.checkpoint.findings import LayerResult, alike
from narrowgauge.harness.tools.checkpoint.judge import Result

if TYPE_CHECKING:
    from rich.console import Console

PAGE, DATA = "checkpoint.html", "checkpoint.json"
SHOWN = 20
"""Findings that are printed. The page and the JSON file have all."""
COLUMNS = ("matrix", "layout", "format", "shape", "scales", "dialect", "SQNR", "findings")
_GLYPH = {"pass": "pass", "warning": "unsupported", "fail": "fail"}
"""Outcome of a run whose mark and colour a verdict has."""


def cells(layer: LayerResult) -> list[str]:
    """A row of the table of matrices."""
    sqnr = "" if layer.sqnr_db is None else f"{layer.sqnr_db:.1f} dB"
    shape = "x".join(map(str, layer.shape))
    kinds = dict.fromkeys(finding.kind for finding in layer.findings)
    row = [layer.name, layer.layout, layer.recipe, shape, layer.scales, layer.dialect, sqnr, ", ".join(kinds)]
    return [escape(cell) for cell in row]


def print_result(result: Result, console: Console, *, strict: bool = False) -> None:
    """Print counts by layout and dialect, the first findings, and the judgement."""
    from collections import Counter

    groups = Counter((layer.layout, layer.recipe, layer.scales, layer.dialect) for layer in result.layers)
    for (layout, recipe, scales, dialect), count in groups.items():
        parts = [
            f"{count} x {layout} {recipe}",
            f"scales {scales}" if scales else "",
            f"dialect {dialect}" if dialect else "",
        ]
        console.print(escape(", ".join(filter(None, parts))), markup=False, highlight=False, soft_wrap=True)
    found = alike(result.all_findings)
    for first, *others in found[:SHOWN]:
        style = {"fail": "bold red", "warning": "yellow", "note": "dim"}[first.severity]
        lines = escape("\n".join(first.lines(others)))
        console.print(lines, markup=False, highlight=False, soft_wrap=True, style=style)
    if len(found) > SHOWN:
        console.print(f"{len(found) - SHOWN} more findings are in the report")
    mark = "pass" if result.passed(strict=strict) else "fail"
    glyph = mark if console.options.ascii_only else text.GLYPHS[mark]
    console.print(f"{glyph} {result.sentence}", markup=False, highlight=False, soft_wrap=True)


def write(result: Result, directory: Path, *, strict: bool = False) -> Path:
    """Write the page and the JSON file into `directory`. Returns the path of the page. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    with replace_files(directory, last=PAGE) as fresh:
        (fresh / DATA).write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
        (fresh / PAGE).write_text(render(result, strict=strict), encoding="utf-8")
    return directory / PAGE


def render(result: Result, *, strict: bool = False) -> str:
    """The page. Names of tensors are escaped."""
    environment = {
        "checkpoint": result.path, "weights": result.weights or "none", "files": str(result.files),
        "tensors": str(result.tensors), "bytes": text.number(result.size),
    }  # fmt: skip
    return template.render(
        Path(__file__).with_name("checkpoint.html"),
        name="narrowgauge checkpoint",
        verdict="pass" if result.passed(strict=strict) else "fail",
        sentence=result.sentence,
        environment=environment,
        columns=COLUMNS,
        rows=[(_GLYPH[layer.verdict], cells(layer)) for layer in result.layers],
        findings=[
            (_GLYPH.get(first.severity, "known"), [escape(line) for line in first.lines(others)])
            for first, *others in alike(result.all_findings)
        ],
    )
