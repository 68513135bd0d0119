"""Statistical tests. A correct kernel fails a test too, with a known small probability."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from narrowgauge.harness.checks.distance import Comparison
from narrowgauge.harness.checks.finding import Describe


@dataclass
class StatisticalTest:
    """Statistical test of a stage. `decide` compares its p-value with a level that depends on all tests of the case."""

    name: str
    log_p: float
    """Natural logarithm of the p-value or of an upper bound of it. Minus infinity for an impossible event."""
    sentence: str
    """Message of a rejection, with its numbers."""
    elements: tuple[torch.Tensor, torch.Tensor, Describe, Comparison] | None = None
    """Arguments of the finding of a rejection: mask of wrong elements, distances, view of an element, comparison."""
    kind: str = ""
    """Common name of tests that look for the same mistake. Empty: the test is the only test of its kind."""
    place: dict[str, int] = field(default_factory=dict)
    """Number of the part of the matrix, such as {"section": 1}."""

    @property
    def probability(self) -> str:
        """`p <= 1e-12`, rounded up."""
        return "p = 0" if self.log_p == -math.inf else f"p <= 1e{math.ceil(self.log_p / math.log(10))}"
