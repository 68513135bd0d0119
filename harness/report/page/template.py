"""Rendering of all pages: a template that extends base.html, autoescaped, with one style and without network access."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowgauge.harness.machine.plain_text import plain_value
from narrowgauge.harness.records.environment import USER_COMMIT
from narrowgauge.harness.report import text
from narrowgauge.harness.report.times import BUSY

_ASSETS = Path(__file__).parent / "assets"
_FIRST = ("backend", "device", "GPU", "seed", "schedules", BUSY, USER_COMMIT)
"""Labels of the facts that are always shown. The others are in a part of the page that opens."""
_OWN_COMMIT = "commit of narrowgauge"


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
    jinja.globals.update(number=text.number, plural=text.plural, glyphs=text.GLYPHS)
    environment = plain_value(values.get("environment", {}))
    # One commit above the fold, and its repository with it: the user's, or else that of narrowgauge.
    first = _FIRST if USER_COMMIT in environment else (*_FIRST, _OWN_COMMIT)
    named = {_OWN_COMMIT if label == "commit" else label: value for label, value in environment.items()}
    shown = {"aside": "", **values, "environment": named, "first_facts": first}
    html = jinja.get_template(template.name).render(
        name=name, verdict=verdict, sentence=sentence, css=Markup(css), js=Markup(script), **shown
    )  # fmt: skip
    return html.encode(errors="replace").decode()  # a message may contain lone surrogates
