"""Rendering of all pages: a template that extends base.html, autoescaped, with one style and without network access."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowgauge.harness.machine.plain_text import plain_value
from narrowgauge.harness.report import text

_ASSETS = Path(__file__).parent / "assets"
_FIRST = ("backend", "device", "GPU", "seed", "schedules", "commit")
"""Labels of the facts that are always shown. The others are in a part of the page that opens."""


def render(template: Path, *, name: str, verdict: str, sentence: str, script: str = "", **values: Any) -> str:
    """Render a page titled `name` with a banner of verdict and sentence; `values` are passed to the template.

    `environment` (by label) and `aside` are shown below the banner if they are given, most of the environment folded.
    Only `script` is executed.
    """
    import jinja2
    from markupsafe import Markup

    css = (_ASSETS / "page.css").read_text(encoding="utf-8")
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, _ASSETS]), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    jinja.globals.update(number=text.number, plural=text.plural, glyphs=text.GLYPHS, first_facts=_FIRST)
    shown = {"aside": "", **values, "environment": plain_value(values.get("environment", {}))}
    html = jinja.get_template(template.name).render(
        name=name, verdict=verdict, sentence=sentence, css=Markup(css), js=Markup(script), **shown
    )  # fmt: skip
    return html.encode(errors="replace").decode()  # a message may contain lone surrogates
