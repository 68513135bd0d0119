"""The page: one HTML file that needs no network, for the person who has to fix the kernel."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.record import VERDICTS, succeeded
from harness.report import text
from harness.report.groups import SEVERITY, SHOWN, Group, group
from harness.view import reproduction, saved_of

OTHERS = 100
"""Further cases listed under a group."""
_HERE = Path(__file__).parent
_TILES = 64
"""Tiles of a heat map in one direction: finer ones are added up."""
_LEVELS = 5
_COLUMNS = {
    "verdict": "verdict", "case": "case", "backend": "backend", "device": "device", "stage": "stage",
    "message": "message", "compared": "compared", "mismatches": "wrong", "max_ulp": "ulp",
    "budget_max": "budget", "sqnr_db": "SQNR dB", "seconds": "seconds",
}  # fmt: skip
_NUMERIC = ("compared", "mismatches", "max_ulp", "budget_max", "sqnr_db", "seconds")


def render(records: list[dict[str, Any]], environment: dict[str, str], elapsed: float) -> str:
    """The whole page. Everything that comes from a record or the environment is escaped."""
    import jinja2
    from markupsafe import Markup

    css, js = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    jinja.globals.update(number=text.number, plural=text.plural, glyphs=text.GLYPHS)
    groups = group(records)
    return jinja.get_template("page.html").render(
        css=Markup(css),
        js=Markup(js),
        # Only this style and this script run, whatever a record contains, and nothing is fetched.
        policy=f"default-src 'none'; style-src '{_digest(css)}'; script-src '{_digest(js)}'",
        verdict="pass" if succeeded(records) else "fail",
        sentence=text.verdict_line(records, elapsed),
        not_compared=text.not_compared(records),
        environment=environment,
        groups=[_group(one) for one in groups[:SHOWN]],
        groups_left=groups[SHOWN:],
        matrix=_matrix(records),
        counts=text.verdict_counts(records),
        records=Markup(island(records)),
    )


def island(records: Iterable[dict[str, Any]]) -> str:
    """The table of all cases as JSON that can stand inside a script element. Infinity and NaN are strings in it."""
    rows = [[_finite(record[column]) for column in _COLUMNS] for record in records]
    rows.sort(key=lambda row: (SEVERITY.index(row[0]), row[1], row[2]))
    columns = [{"label": label, "numeric": name in _NUMERIC} for name, label in _COLUMNS.items()]
    content = {"columns": columns, "rows": rows, "glyphs": text.GLYPHS, "severity": SEVERITY}
    plain = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return plain.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _group(one: Group) -> dict[str, Any]:
    worst, *others = one.records
    findings = sorted(worst["findings"], key=lambda finding: finding.get("stage") != one.stage)
    return {
        "verdict": one.verdict,
        "title": one.title,
        "cases": len(one.records),
        "mismatches": one.mismatches,
        "case": worst["case"],
        "sentence": text.sentence(worst),
        "explanation": text.explanation(one.explanation),
        "reproduction": reproduction(worst),
        "saved": saved_of(one.records),
        "findings": [_finding(finding) for finding in findings],
        "sweep": [(f"1e-{n}", text.share(value)) for n, value in enumerate(worst["sweep"], 1)],
        "figures": _figures(worst),
        "others": [(r["case"], text.sentence(r), reproduction(r)) for r in others[:OTHERS]],
        "others_left": max(0, len(others) - OTHERS),
        "filter": "".join(f"{part}/" for part in (one.operation, one.recipe) if part),
    }


def _figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    number, share = text.number, text.share
    figures = [
        ("compared", number(record["compared"])),
        ("wrong", number(record["mismatches"])),
        ("max ulp", number(record["max_ulp"])),
        ("tier 0, exact", share(record["exact_share"])),
        ("tier 1, declared order", share(record["ordered_share"])),
        ("excused", share(record["excused_share"])),
        ("outside, end to end", share(record["outside_share"])),
        ("budget, max", number(record["budget_max"])),
        ("budget, p99", number(record["budget_p99"])),
        ("interval, max ulps", number(record["interval_ulps_max"])),
        ("interval, mean ulps", number(record["interval_ulps_mean"])),
        ("SQNR, dB", number(record["sqnr_db"])),
        ("allclose would pass", number(record["allclose"])),
        ("time", text.duration(record["seconds"])),
        ("time of reference", text.duration(record["seconds_reference"])),
    ]
    return [(label, value) for label, value in figures if value]


def _finding(finding: dict[str, Any]) -> dict[str, Any]:
    elements = finding.get("elements") or []
    keys = list(dict.fromkeys(key for element in elements for key in element if key != "which"))
    heat = finding.get("heat") or {}
    counts: list[list[int]] = heat.get("counts") or []
    single = sum(map(sum, counts)) == 1  # one wrong element has a place and no pattern
    return {
        "stage": finding.get("stage", ""),
        "rule": finding.get("rule", ""),
        "sentence": finding.get("sentence", ""),
        "which": [element.get("which", "") for element in elements],
        "elements": [(key, [_value(element.get(key)) for element in elements]) for key in keys],
        "heat": _heat(heat) if any(counts) and not single else None,
        "modulo": [
            [_bars(axis, int(n), counts) for n, counts in sorted(divisors.items(), key=lambda item: int(item[0]))]
            for axis, divisors in (finding.get("modulo") or {}).items()
            if not single
        ],
    }


def _value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_value, value))
    return repr(value) if isinstance(value, float) else str(value)


def _heat(heat: dict[str, Any]) -> dict[str, Any]:
    """Squares of the tiles that have a mismatch, and how dark each is."""
    counts: list[list[int]] = heat["counts"]
    down, across = len(counts), max(map(len, counts))
    fold_down, fold_across = math.ceil(down / _TILES), math.ceil(across / _TILES)
    height, width = heat.get("rows", 1) * fold_down, heat.get("columns", 1) * fold_across
    tiles: dict[tuple[int, int], int] = defaultdict(int)
    for row, line in enumerate(counts):
        for column, count in enumerate(line):
            if count:
                tiles[row // fold_down, column // fold_across] += count
    down, across = math.ceil(down / fold_down), math.ceil(across / fold_across)
    most = max(tiles.values(), default=1)
    side = max(6, min(20, 384 // max(down, across)))
    return {
        "side": side,
        "width": side * across,
        "height": side * down,
        "tile": f"{height} × {width}",
        "most": most,
        "tiles": [
            {
                "x": side * column,
                "y": side * row,
                "level": math.ceil(_LEVELS * math.log1p(count) / math.log1p(most)),
                "title": f"rows {_span(row, height)}, columns {_span(column, width)}: {text.number(count)} wrong",
            }
            for (row, column), count in tiles.items()
        ],
    }


def _span(index: int, size: int) -> str:
    return str(index) if size == 1 else f"{index * size}–{(index + 1) * size - 1}"


def _bars(axis: str, divisor: int, counts: list[int]) -> dict[str, Any]:
    """Bars of the counts, and in words which residues have any."""
    hit = [residue for residue, count in enumerate(counts) if count]
    if len(hit) == len(counts):
        which = "every residue"
    elif len(hit) <= 8:
        which = "only " + ", ".join(map(str, hit)) if hit else "none"
    else:
        which = f"{len(hit)} of {len(counts)} residues"
    width, most = max(2, min(12, 256 // divisor)), max(counts, default=0) or 1
    return {
        "title": f"{axis} modulo {divisor}",
        "which": which,
        "width": width * len(counts),
        "bar": width - (1 if width > 3 else 0),
        "bars": [
            {
                "x": width * residue,
                "height": math.ceil(40 * counts[residue] / most),
                "title": f"{axis} % {divisor} = {residue}: {text.number(counts[residue])} wrong",
            }
            for residue in hit
        ],
    }


def _matrix(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A table per operation, recipe, backend and device: shapes down, dtypes across."""
    tables: dict[tuple[str, ...], dict[tuple[str, str], list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        key = (record["operation"], record["recipe"], record["backend"], record["device"])
        tables[key][record["shape"], record["dtype"]].append(record)
    return [_grid(key, cells) for key, cells in sorted(tables.items())]


def _grid(key: tuple[str, ...], cells: dict[tuple[str, str], list[dict[str, Any]]]) -> dict[str, Any]:
    operation, recipe, backend, device = key
    dtypes = sorted({dtype for _, dtype in cells})
    shapes = sorted({shape for shape, _ in cells}, key=_sizes)
    place = [part for part in (operation, recipe) if part]  # a swizzle has neither recipe nor dtype
    return {
        "title": " ".join(place),
        "backend": f"{backend}, {device}",
        "dtypes": dtypes,
        "rows": [
            (
                shape,
                [_cell(cells.get((shape, dtype)), _words(*place, shape, dtype, backend=backend)) for dtype in dtypes],
            )
            for shape in shapes
        ],
    }


def _words(*place: str, backend: str) -> str:
    """What the table of cases is filtered by: the beginning of an id, and the backend."""
    return "".join(f"{part}/" for part in place if part) + f" {backend}"


def _cell(records: list[dict[str, Any]] | None, words: str) -> dict[str, Any] | None:
    if not records:
        return None
    counts = text.verdict_counts(records)
    compared, mismatches = (sum(record[name] for record in records) for name in ("compared", "mismatches"))
    return {
        "verdict": min(counts, key=SEVERITY.index),
        "passed": counts.get("pass", 0),
        "cases": len(records),
        "mismatches": mismatches,
        "filter": words,
        "title": ", ".join(f"{counts[v]} {v}" for v in VERDICTS if v in counts)
        + f"; {text.number(mismatches)} of {text.number(compared)} elements wrong",
    }


def _sizes(shape: str) -> tuple[tuple[int, str], ...]:
    """Sorts 256x64 before 1024x64."""
    return tuple((int(size) if size.isdecimal() else -1, size) for size in shape.split("x"))
