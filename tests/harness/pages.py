"""The content of a page of a report, and its elements in a browser."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1400,1000",
)  # fmt: skip


def island(html: str) -> dict[str, Any]:
    """The JSON inside a page."""
    found = re.search(r'<script type="application/json" id="records">(.*?)</script>', html, re.DOTALL)
    assert found
    content: dict[str, Any] = json.loads(found[1], parse_constant=_no_json)
    return content


def _no_json(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def rows_of(html: str) -> list[dict[str, Any]]:
    """The table of all cases, a dictionary a row."""
    content = island(html)
    columns = {
        column["name"]: [column["values"][n] for n in column["at"]]
        if "at" in column
        else column["values"] * (content["rows"] if len(column["values"]) == 1 else 1)
        for column in content["columns"]
    }
    rows = [{name: values[n] for name, values in columns.items()} for n in range(content["rows"])]
    for row in rows:
        place = "/".join(filter(None, (row[name] for name in ("operation", "recipe", "shape", "dtype"))))
        row["case"] = row["case"].replace("\0", place)
    return rows


def axe() -> Path | None:
    """axe-core, a judge of the accessibility of a page; None if its package is not installed."""
    found = importlib.util.find_spec("axe_playwright_python")
    return Path(found.origin).with_name("axe.min.js") if found and found.origin else None


def opened(page: Path, profile: Path, fragment: str = "", *, flags: Sequence[str] = ()) -> str:
    """The elements of a page, as HTML, after a browser has opened the page and is idle."""
    assert CHROMIUM
    words = [CHROMIUM, *_FLAGS, *flags, f"--user-data-dir={profile}", "--virtual-time-budget=3000", "--dump-dom"]
    done = subprocess.run(
        [*words, f"{page.as_uri()}{fragment}"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
