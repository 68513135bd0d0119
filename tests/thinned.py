"""Parameters of which `make test` takes some, and `make test-long` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(values: Iterable[Any], each: int) -> list[Any]:
    """`values` as parameters: the first of every `each` stays, the others are `long`."""
    return [pytest.param(v, marks=pytest.mark.long if i % each else ()) for i, v in enumerate(values)]
