"""What every page is made by: a template that extends base.html, everything in it escaped, one style and no network."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from narrowgauge.harness.report import text


def policy(style: str, script: str = "") -> str:
    """What stands in the page's meta element, whatever comes from a record into the page besides."""
    allowed = f"default-src 'none'; style-src '{_digest(style)}'"
    return f"{allowed}; script-src '{_digest(script)}'" if script else allowed


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


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
