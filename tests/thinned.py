"""Parameters of which `make test` takes a part, and `make test-long` the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(values: Iterable[Any], each: int) -> list[Any]:
    """`values` as parameters: the first of every `each` stays, the rest is `long`."""
    return thinned_rows(((value,) for value in values), each)


def thinned_rows(rows: Iterable[tuple[Any, ...]], each: int) -> list[Any]:
    """The same of several parameters at once."""
    return [pytest.param(*row, marks=pytest.mark.long if i % each else ()) for i, row in enumerate(rows)]
