"""The content of a page of a report, and its elements in a browser."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest

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
    columns = {column["name"]: _values(column, content["rows"]) for column in content["columns"]}
    rows = [{name: values[n] for name, values in columns.items()} for n in range(content["rows"])]
    for row in rows:
        place = "/".join(filter(None, (row[name] for name in ("operation", "recipe", "shape", "dtype"))))
        row["case"] = row["case"].replace("\0", place)
    return rows


def _values(column: dict[str, Any], rows: int) -> list[Any]:
    """The value of each row."""
    if "digits" in column:
        digests = [column["digits"][16 * n : 16 * n + 16] for n in range(rows)]
        return ["" if digest == "0" * 16 else digest for digest in digests]
    at = column.get("at") or [0] * rows
    if "runs" in column:
        pairs = zip(column["runs"][::2], column["runs"][1::2], strict=True)
        at = [place for place, count in pairs for _ in range(count)]
    values: list[Any] = column["values"]
    return values if len(values) == rows else [values[n] for n in at]


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


def said(written: Path, folder: Path, script: str, width: int, dark: bool, fragment: str = "") -> Any:
    """What a script in the page posts to its window, at this width."""
    html = re.sub(r"<meta http-equiv=[^>]*>", "", written.read_text(encoding="utf-8"))
    (folder / "looks.html").write_text(html.replace("</body>", script), encoding="utf-8")
    # A window has at least 500 px, a frame has any width.
    frame = folder / "frame.html"
    keep = "<script>onmessage = (event) => (document.body.dataset.said = event.data)</script>"
    source = f"looks.html{fragment}"
    frame.write_text(f'<body>{keep}<iframe src="{source}" width="{width}" height="900"></iframe>', encoding="utf-8")
    flags = ("--window-size=2000,1000", f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    result = re.search(r'data-said="([^"]*)"', opened(frame, folder / "profile", flags=flags))
    assert result
    return json.loads(unescape(result[1]))


_RULES = """
<script type="module">
  setTimeout(async () => {
    const { violations } = await axe.run(document, { resultTypes: ["violations"] });
    const words = violations.flatMap(({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html.slice(0, 200)}`));
    if (document.documentElement.scrollWidth > innerWidth) words.push(`wider than ${innerWidth} px`);
    for (const svg of document.querySelectorAll("svg")) {
      const inside = svg.getBoundingClientRect();
      const labels = [...svg.querySelectorAll("text")].filter((label) => label.textContent.trim());
      const places = labels.map((label) => label.getBoundingClientRect());
      places.forEach((a, n) => {
        const [left, right] = [inside.left - a.left, a.right - inside.right];
        const cut = Math.max(left, right, inside.top - a.top, a.bottom - inside.bottom);
        if (inside.width && cut > 1) words.push(`cut off: ${labels[n].textContent}`);
        for (const [m, b] of places.slice(0, n).entries()) {
          const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
          const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
          if (Math.min(wide, high) <= 2) continue;
          words.push(`one over the other: ${labels[m].textContent}, ${labels[n].textContent}`);
        }
      });
    }
    parent.postMessage(JSON.stringify([document.documentElement.dataset.case ?? "", words]), "*");
  }, 1500);
</script></body>"""


def violations(written: Path, folder: Path, width: int, *, dark: bool, fragment: str = "") -> tuple[str, list[str]]:
    """State of the case in the page's address, and elements that violate rules of axe-core, make the page wider than
    `width`, or are labels of a plot that are cut off or overlap."""
    rules = axe()
    assert rules
    script = rules.read_text(encoding="utf-8").replace("</script", "<\\/script")
    case, words = said(written, folder, f"<script>{script}</script>{_RULES}", width, dark, fragment)
    return case, words


needs_axe = pytest.mark.skipif(
    CHROMIUM is None or axe() is None, reason="needs chromium in PATH and axe-playwright-python of the extra `test`"
)
LOOKS = [(390, True), (1280, False), (1920, True)]
"""Widths of a page, and whether it is dark."""
