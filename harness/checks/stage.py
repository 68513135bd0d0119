"""The outcome of checking one stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowgauge.harness.checks.statistics.chance import Chance


@dataclass
class StageResult:
    """One stage, compared. `sentence` is empty where everything is right."""

    stage: str
    rule: str
    compared: int
    mismatches: int = 0
    max_ulp: int | None = None
    sentence: str = ""
    finding: dict[str, Any] | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    """Columns of the record that this stage measured."""
    excused: int = 0
    """Elements that are right by docs/tolerance.md#boundary, though not the reference's."""
    draws: int = 0
    """Roundings by random bits of the backend's own that the tests of this stage counted."""
    wrong: torch.Tensor | None = None
    """bool: the wrong elements, in the coordinates of the finding; None where there are none, or none has a place."""
    causes: list[str] = field(default_factory=list)
    """Why it is wrong, as explanations name it, where whoever judged it knows: of guard zones and repeated runs."""
    chances: list[Chance] = field(default_factory=list)
    """Tests that a right kernel fails by chance; `decide` has the last word on the stage."""

    @property
    def right(self) -> bool:
        return not self.sentence

    def add(self, other: StageResult) -> None:
        """Take in the same stage of a further door or section: its counts; the rest where this one is right."""
        if self.right:
            self.sentence, self.finding, self.wrong = other.sentence, other.finding, other.wrong
            self.causes = other.causes
        self.compared += other.compared
        self.mismatches += other.mismatches
        self.excused += other.excused
        self.chances += other.chances
        self.draws += other.draws
        self.max_ulp = max((n for n in (self.max_ulp, other.max_ulp) if n is not None), default=None)

    def entry(self) -> dict[str, Any]:
        """What the record keeps of it."""
        return {
            "stage": self.stage, "rule": self.rule, "compared": self.compared, "mismatches": self.mismatches,
            "max_ulp": self.max_ulp, "excused": self.excused, "sentence": self.sentence,
        }  # fmt: skip


def merged(parts: Sequence[Sequence[StageResult]], noun: str) -> list[StageResult]:
    """The stages of several parts of one matrix as one stage each; a sentence names the first wrong part."""
    found: dict[str, StageResult] = {}
    for number, stages in enumerate(parts):
        for stage in stages:
            if stage.sentence:
                stage.sentence = f"{noun} {number} of {len(parts)}: {stage.sentence}"
            if stage.finding is not None:
                stage.finding["sentence"] = stage.sentence
                for element in stage.finding["elements"]:
                    element[noun] = number
            for chance in stage.chances:
                chance.sentence = f"{noun} {number} of {len(parts)}: {chance.sentence}"
                chance.place[noun] = number
            if stage.stage in found:
                found[stage.stage].add(stage)
            else:
                found[stage.stage] = stage
    return list(found.values())
