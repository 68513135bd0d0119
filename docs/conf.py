"""Sphinx configuration: the pages of the repository and an API reference, built by `make docs`.

The source folder is the root of the repository: a link between pages works on the site and in the repository.
Docstrings are prose with `code` in single backticks, not reStructuredText; `escape` makes docstrings literal.
"""

from __future__ import annotations

import re
from typing import Any

from narrowgauge.spec import VERSION

project = "narrowgauge"
version = release = VERSION
extensions = ["sphinx.ext.autodoc", "myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "cases/README.md", "reports/README.md",
    "tests/golden/README.md", "tests/golden/accumulators/README.md", "harness/diagnosis/causes.md",
]  # fmt: skip
exclude_patterns = [".*", "narrowgauge", "native", "reference"]

nitpicky = True
"""A cross reference without a target is a warning, and `make docs` turns warnings into errors."""
nitpick_ignore_regex = [
    ("py:class", r"(torch|collections|contextlib|pathlib)\..*"),  # no inventory: the build needs no network
    ("py:class", r"Path|list\[dict\[str"),  # written without its module; a part of a type
    ("py:obj", r"typing\.Annotated\[.*"),  # keys of cases, with their checks
    ("py:class", r"narrowgauge\.reference\.accumulators\.trees\..*|narrowgauge\.harness\.checks\.order\.order\.Slices"),
    ("py:class", r"narrowgauge\.(native|reference)\.modules\..*|narrowgauge\.spec\.autocast\.T"),  # not public
]
myst_heading_anchors = 4
"""Headings have the anchors of GitHub, which tests/test_docs.py checks."""

html_theme = "furo"
html_title = f"narrowgauge {VERSION}"
html_show_copyright = html_show_sphinx = False
html_copy_source = html_show_sourcelink = False
html_additional_pages = {"index": "to_index.html"}
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["wide.css"]

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100

_CODE = re.compile(r"`([^`]+)`")
_SPECIAL = re.compile(r"([\\*|_])")


def escape(line: str) -> str:
    """A line of a docstring as reStructuredText: `code` as a literal, every other character as itself."""
    parts = _CODE.split(line)
    return "".join(f"``{part}``" if number % 2 else _SPECIAL.sub(r"\\\1", part) for number, part in enumerate(parts))


def process_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escape every line, and keep indented lines as a literal block."""
    result: list[str] = []
    for line in lines:
        if line.startswith(" "):
            if result and not result[-1]:
                result += ["::", ""]
            result.append(line)
        else:
            result.append(escape(line))
    lines[:] = result


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", process_docstring)
