"""Result of the check of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowgauge.harness.checks.statistics.statistical_tests import StatisticalTest


@dataclass
class StageResult:
    """Result of the check of a stage. `sentence` is empty if the stage passed."""

    stage: str
    rule: str
    compared: int
    mismatches: int = 0
    max_ulp: int | None = None
    sentence: str = ""
    finding: dict[str, Any] | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    """Columns of the record that the check of this stage measured."""
    excused: int = 0
    """Elements that differ from the reference but are correct by docs/tolerance.md#boundary."""
    unbounded: int | None = None
    """Elements whose accepted interval has an infinite end, because a sum may overflow: they are hardly judged. None if
    elements have no intervals."""
    draws: int = 0
    """Roundings that the statistical tests of this stage counted, if the backend makes its own random bits."""
    wrong_elements: torch.Tensor | None = None
    """bool mask of the wrong elements in the coordinates of the finding. None: no wrong elements, or no coordinates."""
    causes: list[str] = field(default_factory=list)
    """Causes observed by the check itself (guard zones, repeated runs), by the names of explanations."""
    assumes: str = ""
    """What the bound of this stage assumes of device functions (docs/tolerance.md#device-functions); empty if
    nothing."""
    tests: list[StatisticalTest] = field(default_factory=list)
    """Tests that a correct kernel can fail by chance. `decide` fails the stage if a test rejects."""

    @property
    def passed(self) -> bool:
        return not self.sentence

    def add(self, further: StageResult) -> None:
        """Add the same stage of a further call or section: its counts, and its finding if this stage has passed."""
        if self.passed:
            self.sentence, self.finding, self.wrong_elements = further.sentence, further.finding, further.wrong_elements
            self.causes = further.causes
        self.compared += further.compared
        self.mismatches += further.mismatches
        self.excused += further.excused
        if further.unbounded is not None:
            self.unbounded = (self.unbounded or 0) + further.unbounded
        self.tests += further.tests
        self.draws += further.draws
        self.max_ulp = max((n for n in (self.max_ulp, further.max_ulp) if n is not None), default=None)

    def entry(self) -> dict[str, Any]:
        """The stage as an entry of the record's `stages`."""
        return {
            "stage": self.stage, "rule": self.rule, "compared": self.compared, "mismatches": self.mismatches,
            "max_ulp": self.max_ulp, "excused": self.excused, "unbounded": self.unbounded,
            "sentence": self.sentence,
        }  # fmt: skip


def merge_stages(parts: Sequence[Sequence[StageResult]], noun: str) -> list[StageResult]:
    """Join the stages of several parts of a matrix. The sentence of a joined stage names its first wrong part."""
    merged_stages: dict[str, StageResult] = {}
    for number, stages in enumerate(parts):
        for stage in stages:
            if stage.sentence:
                stage.sentence = f"{noun} {number} of {len(parts)}: {stage.sentence}"
            if stage.finding is not None:
                stage.finding["sentence"] = stage.sentence
                for element in stage.finding["elements"]:
                    element[noun] = number
            for test in stage.tests:
                test.sentence = f"{noun} {number} of {len(parts)}: {test.sentence}"
                test.place[noun] = number
            if stage.stage in merged_stages:
                merged_stages[stage.stage].add(stage)
            else:
                merged_stages[stage.stage] = stage
    return list(merged_stages.values())
