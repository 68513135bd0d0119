"""Lines by kind, printed: what kind, how many, and the first of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from narrowgauge.harness.report.text import number, sentence

LISTED = 50
"""Lines of one kind that are printed; the last says how many more there are."""


def print_kinds(kinds: Mapping[str, Sequence[str]], console: Console, style: str) -> None:
    """Print every kind that has lines."""
    for kind, lines in kinds.items():
        if lines:
            console.print(f"{kind}: {len(lines)}", style=style, markup=False, highlight=False)
        for line in lines[:LISTED]:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        if len(lines) > LISTED:
            console.print(f"  … and {number(len(lines) - LISTED)} more", markup=False, highlight=False)


def why(record: dict[str, Any]) -> str:
    """What a record that did not pass says is wrong, in brackets and on one line; nothing of one that passed."""
    said = " ".join(sentence(record).split()) if record["verdict"] != "pass" else ""
    said = said.encode(errors="replace").decode()  # half a surrogate pair can be printed nowhere
    return f" ({said})" if said else ""
