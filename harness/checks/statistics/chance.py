"""Tests that a right kernel fails too, with a known small probability; and how a case decides over all of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from narrowgauge.harness.checks.finding import Describe, Sides


@dataclass
class Chance:
    """One such test of a stage. It rejects, or does not, when all tests of a case are known."""

    test: str
    log_p: float
    """Natural logarithm of the p-value, or of a bound above it; minus infinity of what never happens."""
    sentence: str
    """What is wrong where it rejects, with its numbers."""
    elements: tuple[torch.Tensor, torch.Tensor, Describe, Sides] | None = None
    """What a finding is made of where it rejects: the wrong elements, bool, their distances, how to show one, and what
    was compared."""
    kind: str = ""
    """What tests that look for the same have in common; by itself where empty."""
    place: dict[str, int] = field(default_factory=dict)
    """Where among several parts: the section."""

    @property
    def probability(self) -> str:
        """`p <= 1e-12`, rounded up."""
        return "p = 0" if self.log_p == -math.inf else f"p <= 1e{math.ceil(self.log_p / math.log(10))}"
