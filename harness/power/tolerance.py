"""The tightest tolerance that accepts right kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class Tightest:
    """The tightest tolerance for given right results: absolute and relative error are at most the largest of these
    results."""

    def __init__(self) -> None:
        self.atol = self.rtol = 0.0

    def add(self, actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        """Accept the values of a further right kernel."""
        for a, e in zip(actual, expected, strict=True):
            self.atol, self.rtol = (max(pair) for pair in zip((self.atol, self.rtol), _errors(a, e), strict=True))

    def accepts(self, actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
        """Whether values lie within the tolerance."""
        pairs = [_errors(a, e) for a, e in zip(actual, expected, strict=True)]
        return all(atol <= self.atol and rtol <= self.rtol for atol, rtol in pairs)


def _errors(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Largest absolute and relative error; infinite if only `actual` or only `expected` has a NaN or an infinity."""
    if actual.shape != expected.shape:
        return math.inf, math.inf
    a, e = actual.double(), expected.double()
    same = (a == e) | (a.isnan() & e.isnan())
    error = torch.where(same, 0.0, (a - e).abs()).nan_to_num(nan=math.inf)
    relative = torch.where(same, 0.0, error / e.abs()).nan_to_num(nan=math.inf)
    return (float(error.max()), float(relative.max())) if error.numel() else (0.0, 0.0)
