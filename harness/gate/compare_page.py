"""The page of a comparison: one HTML file that needs no network."""

from __future__ import annotations

from pathlib import Path

from harness.gate.compare import TIME_COLUMNS, Comparison
from harness.report import page, text
from harness.report.policy import policy

MOST = 5000
"""Cases of one kind on the page; it says how many it left out."""


def render(found: Comparison, a: str, b: str) -> str:
    """The page of a comparison of the runs called `a` and `b`. Everything that comes from a record is escaped."""
    import jinja2
    from markupsafe import Markup

    css = Path(page.__file__).with_name("page.css").read_text(encoding="utf-8")
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    jinja.globals.update(plural=text.plural, glyphs=text.GLYPHS)
    html = jinja.get_template("compare.html").render(
        css=Markup(css),
        policy=policy(css),
        verdict="pass" if found.no_worse else "fail",
        found=found,
        a=a,
        b=b,
        time_columns=TIME_COLUMNS,
        times=[time.cells() for time in found.times],
        most=MOST,
    )
    return html.encode(errors="replace").decode()  # a name may hold half a surrogate pair
