"""The outcome of checking one stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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

    @property
    def right(self) -> bool:
        return not self.sentence

    def add(self, other: StageResult) -> None:
        """Take in the same stage of a further door: its counts, and its sentence where this one has none."""
        self.compared += other.compared
        self.mismatches += other.mismatches
        self.sentence = self.sentence or other.sentence

    def entry(self) -> dict[str, Any]:
        """What the record keeps of it."""
        return {
            "stage": self.stage, "rule": self.rule, "compared": self.compared, "mismatches": self.mismatches,
            "max_ulp": self.max_ulp, "sentence": self.sentence,
        }  # fmt: skip
