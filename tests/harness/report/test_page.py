"""The page: its content, and its elements in a browser."""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from narrowgauge.harness.records import history
from narrowgauge.harness.records.history import update
from narrowgauge.harness.report.groups import SEVERITY, group
from narrowgauge.harness.report.page import page
from narrowgauge.harness.report.page import records_json as island_of
from narrowgauge.harness.report.page.failure import failure
from narrowgauge.harness.report.page.records_json import sorted_records
from tests.harness.pages import CHROMIUM, LOOKS, island, needs_axe, opened, rows_of, said, violations
from tests.harness.report.test_report import ENVIRONMENT, FINDING, NASTY, failing, mixed, record
from tests.harness.runs import run

browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium in PATH to open the page with")
SEEN = {
    **FINDING,
    "steps": [[-2, -2, 5], [-1, -1, 0], [0, 0, 987], [1, 1, 32]],
    "table": {
        "title": "row 3, block 32",
        "rows": [["column", "x"], ["516", "0.5"], ["517", "0.625"]],
        "different": [2],
    },
    "census": {"expected": {"nan": 0, "saturated": 7}, "actual": {"nan": 3, "saturated": 7}},
}


def rendered(records: list[dict[str, Any]]) -> str:
    return page.render(records, ENVIRONMENT, 12.5)


def test_nothing_is_html_that_should_be_text() -> None:
    html = rendered(mixed())
    assert "<script>alert" not in html
    assert len(re.findall(r"<script\b", html)) == html.count("</script>") == 2
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;&#34;&#39;") >= 5
    assert [row["case"] for row in rows_of(html)].count(f"quantize/nvfp4/64x128/bf16/{NASTY}") == 1


def test_the_table_has_every_record_the_worst_first() -> None:
    records = [*mixed(), record("nan", sqnr_db=math.nan), record("less", sqnr_db=-math.inf)]
    assert not set("<>&") & set(island_of.records_json(sorted_records(records), group(records)))
    rows = rows_of(rendered(records))
    assert [row["case"] for row in rows] == [one["case"] for one in sorted_records(records)]
    assert [row["verdict"] for row in rows] == sorted((row["verdict"] for row in rows), key=SEVERITY.index)
    assert {row["case"].rpartition("/")[2]: row["sqnr_db"] for row in rows if row["verdict"] == "pass"} == {
        "normal": "Infinity", "nan": "NaN", "less": "-Infinity",
    }  # fmt: skip


def test_columns_are_packed_without_loss() -> None:
    digests = [f"{n * 0x123456789ABCDEF:016x}" for n in range(1, 6)]
    records = [record(f"p{n}", input_digest=digest, seed=7) for n, digest in enumerate(digests)]
    records += [record(f"q{n}", recipe="mxfp4", input_digest="") for n in range(2)]
    content = {column["name"]: column for column in island(rendered(records))["columns"]}
    assert content["recipe"]["runs"] == [0, 2, 1, 5]  # mxfp4 first
    rows = rows_of(rendered(records))
    guarded = [
        {"stage": "codes", "rule": "exact", "compared": 1000},
        {"stage": "memory", "rule": "guard", "compared": 24},
    ]
    assert rows_of(rendered([record(stages=guarded)]))[0]["compared"] == 1000  # as the sum in the banner
    assert [row["input_digest"] for row in rows] == ["", "", *digests]
    assert [row["recipe"] for row in rows] == ["mxfp4"] * 2 + ["nvfp4"] * 5


def test_figures_have_a_budget_and_every_group_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [failing(f"i{n}") for n in range(9)] + [failing("other", recipe="mxfp4")]
    size = len(json.dumps(failure(records[0], []), separators=(",", ":")))
    monkeypatch.setattr(island_of, "FIGURES", 3 * size + size // 2)
    html = rendered(records)
    told = [rows_of(html)[int(row)]["recipe"] for row in island(html)["failures"]]
    assert sorted(told) == ["mxfp4", "nvfp4", "nvfp4"]


@pytest.mark.parametrize(
    ("name", "version", "digest"),
    [
        ("d3.min.js", "v7.9.2", "912111098ea99503a6f4967361d2bbdc9dbf58cf9c678c8e27e5b02d1a07f0c1"),
        ("plot.umd.min.js", "v0.6.17", "4358086467740777dd788d6b27a95cebdbaefdd50c730a3060117073bd7134cb"),
    ],
)
def test_vendored_libraries_are_unchanged(name: str, version: str, digest: str) -> None:
    vendor = Path(page.__file__).parent / "assets" / "vendor"
    content = (vendor / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == digest
    assert version.encode() in content.splitlines()[0]
    assert b"</script" not in content.lower()
    assert "Permission to use" in (vendor / f"{name.partition('.')[0]}.LICENSE").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with failures of several kinds, also a hostile failure."""
    budget = [5, 4, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    explained = [{"cause": "ties-away", "sentence": "ties round away", "stage": "codes", "exact": True}]
    band = {"cause": "place:rows-4-to-7-of-16", "sentence": "only in rows 4 to 7", "stage": "codes", "exact": False}
    first = failing(
        "first", mismatches=40, explanations=[*explained, band], findings=[SEEN], sweep=[1.0, 0.5],
        budget_histogram=budget, saved="failures/a.safetensors", shrunk="1x16", input_digest="0123456789abcdef",
    )  # fmt: skip
    alike = (failing(f"i{n}", recipe="mxfp4", mismatches=5) for n in range(3))
    passing = (record(f"p{n}", seconds=0.001 * n) for n in range(300))
    products = (
        record(
            f"k{k}", operation="gemm", recipe="mxfp8-e4m3", shape=f"64x{k}x64", dtype="bf16xbf16-fp32", budget_max=0.5
        )
        for k in (48, 96)
    )
    path = tmp_path_factory.mktemp("page") / "index.html"
    records = [first | {"baseline": "it passed"}, *alike, *mixed(), *products, *passing]
    for seconds in (7.0, 5.0):
        past = update(run(*records[: 300 + int(seconds)], elapsed=seconds), path.parent / history.NAME, complete=True)[
            1
        ]
    path.write_text(page.render(records, ENVIRONMENT, 12.5, past), encoding="utf-8")
    return path


def without_error(html: str) -> str:
    """The elements made by a browser; fails after an error."""
    head = re.search(r"<html[^>]*>", html)
    assert head
    assert "data-error" not in head[0]
    assert "data-loaded" in head[0]
    assert "data-drawn" in head[0]
    return re.sub(r'<script type="application/json".*?</script>', "", html, flags=re.DOTALL)


@browser
def test_a_browser_opens_the_page_and_a_failing_case(written: Path, profile: Path) -> None:
    case = "quantize/nvfp4/64x128/bf16/first"
    html = without_error(opened(written, profile, f"#words=first&case={quote(case, safe='')}"))
    assert "<script>alert" not in html
    shown = html[html.index('<tr class="opened">') :]
    parts = [
        "explained exactly by: ties round away", "37 of 1024 codes differ", f"narrowgauge show {case} --backend native",
        '<th scope="row">column in block</th>',
        "row 3, block 32", '<tr class="differs"><td>517</td>', "heat map of wrong elements",
        "rows 0–15, columns 16–31: 30 wrong", "wrong in a square:", " 7</span>",
        "elements by actual minus expected, in steps",
        '<th scope="row">−2</th>', '<th scope="row">+1</th>', "special values", '<td class="number differs">3</td>',
        "fails at 1x16 too",
        "equal bytes", "above 1", "<td>50 %</td>", "0123456789abcdef", "digest of results",
        "cases by the time of the kernel",
    ]  # fmt: skip
    places = [shown.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert "baseline: it passed" in shown
    assert shown.index("explained exactly") < shown.index("37 of 1024 codes")
    assert shown.count('<rect class="band"') == 2  # of 32 rows
    assert "Bars at the edge: rows 4 to 7 of every 16." in shown
    assert "row modulo 16" in shown
    assert "1 of 313 cases" in html
    assert 'aria-label="quantize nvfp4 bf16: ' in html
    assert "Wrong elements by actual minus expected" in html
    assert all(f"{title} by run</h3>" in html for title in ("Failed cases", "distance of a wrong element", "Time"))


@browser
def test_the_address_filters_and_sorts(written: Path, profile: Path) -> None:
    html = without_error(opened(written, profile, "#words=bf16+p1&verdicts=pass&sort=seconds&order=descending"))
    assert "111 of 313 cases" in html
    body = html[html.index('<table id="table">') :]
    assert re.findall(r"bf16/<wbr>(p\d+)</button>", body)[:3] == ["p199", "p198", "p197"]
    assert 'aria-sort="descending"' in body
    assert '<td class="number">199 ms</td>' in body
    assert body.count("<tr data-row=") == 100  # not all rows at once


CONTROLS = """
<script type="module">
  const copied = [];
  document.execCommand = () => copied.push(document.activeElement.value) > 0;
  Object.defineProperty(navigator, "clipboard", { value: undefined });
  document.querySelector("details[open] .copy").click();
  const said = () => ({
    width: [innerWidth, document.documentElement.scrollWidth <= innerWidth],
    copied,
    plots: document.querySelectorAll("svg.plot[aria-label]").length,
    cells: document.querySelectorAll("#heat-map td button").length,
    unlike: [...document.querySelectorAll("#heat-map td button")].filter((cell) => {
      const look = (element) => [getComputedStyle(element).color, getComputedStyle(element).backgroundColor].join();
      const shown = document.querySelector(`.key .${cell.classList[1]}:not(.outside)`);
      return !shown || look(shown) !== look(cell);
    }).map((cell) => cell.title),
    nameless: [...document.querySelectorAll("button, select, input")].filter(
      (e) => !(e.ariaLabel || e.textContent.trim() || e.closest("label"))).map((e) => e.outerHTML),
    twice: [...document.querySelectorAll("[id]")].map((e) => e.id).filter((id, n, all) => all.indexOf(id) !== n),
    lengths: [...document.querySelectorAll("figure")].filter((e) => e.textContent.startsWith("Error of GEMM outputs"))
      .flatMap((e) => [...e.querySelectorAll("text")].map((label) => label.textContent))
      .filter((label) => /^\\d{2,}$/.test(label)),
    dead: [...document.querySelectorAll('nav a[href^="#"]')].map((a) => a.hash).filter(
      (hash) => !document.querySelector(hash)),
    error: document.documentElement.dataset.error ?? "",
  });
  setTimeout(() => {
    const before = said();
    document.querySelector("#heat-map td button.fail").click();
    before.filtered = document.getElementById("shown").textContent;
    before.dimmed = document.querySelectorAll("#heat-map .outside").length;
    document.querySelector('.first a[href="#group-2"]').click();
    setTimeout(() => {
      before.opened = [...document.querySelectorAll("details.group")].filter((e) => e.open).map((e) => e.id);
      parent.postMessage(JSON.stringify(before), "*");
    }, 300);
  }, 1500);
</script></body>"""


@browser
@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_page_fits_and_its_controls_work(width: int, dark: bool, written: Path, tmp_path: Path) -> None:
    seen = said(written, tmp_path, CONTROLS, width, dark)
    assert seen["width"] == [width, True]
    assert (seen["nameless"], seen["twice"], seen["dead"], seen["error"]) == ([], [], [], "")
    assert seen["copied"][0].startswith("narrowgauge show quantize/")
    assert seen["plots"] >= 1
    assert sorted(seen["lengths"]) == ["48", "96"]  # no powers of two, and the only ones
    assert seen["opened"] == ["group-1", "group-2"]  # the first is open from the start
    assert seen["unlike"] == []  # the legend has the colours of every cell
    assert seen["dimmed"] == seen["cells"] - 1
    assert re.fullmatch(r"\d+ of 313 cases", seen["filtered"])
    assert not seen["filtered"].startswith("313 ")


@needs_axe
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_accessibility(width: int, dark: bool, written: Path, tmp_path: Path) -> None:
    """No rule of axe-core is violated, with a failing case open."""
    fragment = f"#case={quote('quantize/nvfp4/64x128/bf16/first', safe='')}"
    assert violations(written, tmp_path, width, dark=dark, fragment=fragment) == ("open", [])
