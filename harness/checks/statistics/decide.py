"""The decision of a case over all its statistical tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

from narrowgauge.harness.checks.finding import finding
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.checks.statistics.chance import Chance
from narrowgauge.harness.checks.statistics.holm import FALSE_ALARM, holm

TOLD = 3
"""Kinds of rejecting tests that a sentence shows with their numbers. Further tests are named only."""


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
