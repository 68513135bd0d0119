"""Tests that a right kernel fails too, with a known small probability; and how a case decides over all of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from harness.checks.holm import FALSE_ALARM, holm
from harness.finding import Describe, Sides, finding

if TYPE_CHECKING:
    from harness.checks.stage import StageResult


TOLD = 3
"""Kinds of tests that reject whose numbers a sentence gives; of the others it gives the names."""


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


def decide(stages: Sequence[StageResult], sharing: int = 1) -> None:
    """Fail the stages whose tests reject by Holm's procedure at 1e-9/`sharing`, all tests of a case together.

    `sharing` is how many cases of the run do that, so that all of them keep to FALSE_ALARM. The smallest p-value,
    adjusted for the number of tests, becomes the figure `p_value` of the first stage that has tests.
    """
    given = [(stage, chance) for stage in stages for chance in stage.chances]
    if not given:
        return
    log_p = [chance.log_p for _, chance in given]
    given[0][0].figures["p_value"] = min(1.0, math.exp(min(log_p) + math.log(len(log_p))))
    rejected = holm(log_p, math.log(FALSE_ALARM / sharing))
    for stage in stages:
        wrong = [c for (of, c), rejects in zip(given, rejected, strict=True) if rejects and of is stage]
        if wrong and stage.right:
            _fail(stage, sorted(wrong, key=lambda chance: chance.log_p))


def _fail(stage: StageResult, chances: list[Chance]) -> None:
    """Make `stage` wrong by tests that reject it, the surest first."""
    surest: dict[str, Chance] = {}
    for chance in chances:
        surest.setdefault(chance.kind or chance.test, chance)
    first, *others = surest.values()
    told = [f"{c.test}: {c.sentence}, {c.probability}" for c in (first, *others[: TOLD - 1])]
    stage.sentence = "; ".join(told)
    if names := [chance.test for chance in others[TOLD - 1 :]]:
        stage.sentence += f"; rejected too by {', '.join(names)}"
    if first.elements is not None:
        stage.wrong, distance, describe, sides = first.elements
        stage.mismatches, stage.max_ulp = int(stage.wrong.sum()), int(distance.amax())
        stage.finding = finding(
            stage.stage, stage.rule, stage.sentence, stage.wrong, distance, describe=describe, sides=sides
        )
        for element in stage.finding["elements"]:
            element.update(first.place)
