"""What every page is made by: a template that extends base.html, everything in it escaped, one style and no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowgauge.harness.report import text
from narrowgauge.harness.report.page.policy import policy

_ASSETS = Path(__file__).parent / "assets"


def render(template: Path, *, name: str, verdict: str, sentence: str, script: str = "", **values: Any) -> str:
    """A page of this name, whose banner is a verdict and a sentence; `values` are what the template shows.

    `environment`, by label, and `aside` stand below the banner where they are given. Nothing is run but `script`.
    """
    import jinja2
    from markupsafe import Markup

    css = (_ASSETS / "page.css").read_text(encoding="utf-8")
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, _ASSETS]), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    jinja.globals.update(number=text.number, plural=text.plural, glyphs=text.GLYPHS)
    shown = {"environment": {}, "aside": "", **values}
    html = jinja.get_template(template.name).render(
        name=name, verdict=verdict, sentence=sentence, policy=policy(css, script), css=Markup(css), js=Markup(script),
        **shown,
    )  # fmt: skip
    return html.encode(errors="replace").decode()  # a message may hold half a surrogate pair
