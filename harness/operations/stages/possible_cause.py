"""Causes of wrong results, certain and possible. This module does not import torch: reports read it."""

from __future__ import annotations

from typing import NamedTuple

Cause = tuple[str, str]
"""Name of a cause and its sentence."""


GIVES_EVERY_BYTE = "; gives every byte, but "
FREE = "under it these inputs have almost any bytes"
"""Doubt of a cause under which a case shows nothing."""
"""Words in the sentence of a cause that gives the bytes and is not certain; the reason follows."""


class PossibleCause(NamedTuple):
    """A cause with rivals (`GIVES_EVERY_BYTE`), or a sentence about a search without a result."""

    name: str
    sentence: str
    exact: bool = False
