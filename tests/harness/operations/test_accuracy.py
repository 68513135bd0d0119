"""The table of accuracy costs of recipes: in page, summary and terminal, and in no verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowgauge.harness.report import accuracy, report
from tests.harness.runs import record


def measured(tensor: str, sqnr_db: float | None, relative_error: float | None, cosine: float | None) -> dict[str, Any]:
    return {"tensor": tensor, "sqnr_db": sqnr_db, "relative_error": relative_error, "cosine": cosine}


def module(inputs: str, *entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    names = {"operation": "linear", "recipe": "NVFP4BlockScaling", "shape": "1x32x64x32"}
    return record(inputs, **{**names, **changes}) | {"accuracy": list(entries)}


def some() -> list[dict[str, Any]]:
    y = [measured("y", db, error, 0.99) for db, error in ((20.0, 0.1), (18.0, 0.125), (25.0, 0.05))]
    return [
        *(module(str(n), entry, measured("dw", 15.5, 0.17, 0.98)) for n, entry in enumerate(y)),
        module("zeros", measured("y", None, 0.5, None), recipe="MXFP8BlockScaling"),
        record(),
    ]


def written(records: list[dict[str, Any]], folder: Path) -> tuple[str, str]:
    page = report.write(records, {}, folder, elapsed=1.0).read_text(encoding="utf-8")
    return page, (folder / "summary.md").read_text(encoding="utf-8")


def test_medians_of_a_recipe_and_an_operation() -> None:
    first, second = accuracy.rows(some())
    assert (first.recipe, first.operation, first.cases) == ("MXFP8BlockScaling", "linear", 1)
    assert first.figures == (None, 0.5, *[None] * 7)
    assert first.cells == ["", "0.5", *[""] * 7]
    assert (second.recipe, second.cases) == ("NVFP4BlockScaling", 3)
    assert second.figures == (20.0, 0.1, 0.99, None, None, None, 15.5, 0.17, 0.98)
    assert second.cells == ["20.0", "0.1", "0.9900", "", "", "", "15.5", "0.17", "0.9800"]


def test_page_and_summary_have_the_table(tmp_path: Path) -> None:
    page, summary = written(some(), tmp_path)
    table = page.partition('<section id="accuracy">')[2].partition("</section>")[0]
    assert accuracy.TITLE in table
    assert "in no verdict" in table
    assert '<th scope="row">NVFP4BlockScaling</th><td>linear</td><td class="number">3</td>' in table
    assert '<td class="number">20.0</td><td class="number">0.1</td><td class="number">0.9900</td>' in table
    assert '<a href="#accuracy">' in page
    assert f"\n## {accuracy.TITLE}\n\n{accuracy.NOTE}\n\n| recipe | operation | cases | y SQNR dB |" in summary
    assert "\n| NVFP4BlockScaling | linear | 3 | 20.0 | 0.1 | 0.9900 |  |  |  | 15.5 | 0.17 | 0.9800 |\n" in summary
