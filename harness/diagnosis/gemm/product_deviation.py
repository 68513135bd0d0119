"""One known deviation of a product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from narrowgauge.harness.diagnosis.gemm.terms import Finish, Terms, finish


def _same(terms: Terms) -> Terms:
    return terms


@dataclass(frozen=True)
class Deviation:
    """A wrong product: other terms than the right ones, another epilogue, or both."""

    cause: str
    sentence: str
    change: Callable[[Terms], Terms | None] = _same
    """The terms that it multiplies; None where a product is such that the deviation means nothing."""
    finish: Finish = finish
