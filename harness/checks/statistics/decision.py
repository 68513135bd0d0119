"""Decision of a case over all its statistical tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

from narrowgauge.harness.checks.distance import measure
from narrowgauge.harness.checks.finding import make_finding
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.checks.statistics.holm import FALSE_ALARM, holm
from narrowgauge.harness.checks.statistics.statistical_tests import StatisticalTest

DESCRIBED_TESTS = 3
"""Kinds of rejecting tests that a sentence shows with their numbers. For further tests it shows only the names."""


def decide(stages: Sequence[StageResult], sharing: int = 1) -> None:
    """Apply Holm's procedure at level FALSE_ALARM/`sharing` to all tests of a case; fail the stages of rejecting tests.

    `sharing`: number of cases of the run with statistical tests. Together they keep to FALSE_ALARM. The smallest
    p-value, adjusted for the number of tests, becomes the figure `p_value` of the first stage with tests.
    """
    stage_tests = [(stage, test) for stage in stages for test in stage.tests]
    if not stage_tests:
        return
    log_p = [test.log_p for _, test in stage_tests]
    stage_tests[0][0].figures["p_value"] = min(1.0, math.exp(min(log_p) + math.log(len(log_p))))
    rejected = holm(log_p, math.log(FALSE_ALARM / sharing))
    for stage in stages:
        rejecting = [
            test
            for (test_stage, test), rejects in zip(stage_tests, rejected, strict=True)
            if rejects and test_stage is stage
        ]
        if rejecting and stage.passed:
            _fail(stage, sorted(rejecting, key=lambda test: test.log_p))


def _fail(stage: StageResult, tests: list[StatisticalTest]) -> None:
    """Fail `stage` by the rejecting tests, in ascending order of their p-values."""
    surest: dict[str, StatisticalTest] = {}
    for test in tests:
        surest.setdefault(test.kind or test.name, test)
    first, *further = surest.values()
    descriptions = [
        f"{test.name}: {test.sentence}, {test.probability}" for test in (first, *further[: DESCRIBED_TESTS - 1])
    ]
    stage.sentence = "; ".join(descriptions)
    if names := [test.name for test in further[DESCRIBED_TESTS - 1 :]]:
        stage.sentence += f"; rejected too by {', '.join(names)}"
    if first.elements is not None:
        stage.wrong_elements, distance, describe, comparison = first.elements
        stage.mismatches, stage.max_ulp = int(stage.wrong_elements.sum()), int(distance.amax())
        stage.finding = make_finding(
            stage.stage,
            stage.rule,
            stage.sentence,
            stage.wrong_elements,
            measure(stage.wrong_elements, distance, comparison),
            describe=describe,
            comparison=comparison,
        )
        for element in stage.finding["elements"]:
            element.update(first.place)
