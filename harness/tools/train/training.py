"""One training of a session, as far as it got."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from narrowgauge.harness.tools.train.train import Step, Task

LAST = 20
"""Steps at the end whose mean loss is the final loss."""


@dataclass
class Training:
    """A training, as far as it got."""

    task: Task
    steps: list[Step] = field(default_factory=list)
    error: str = ""
    """Why it ended early."""
    seconds: float = 0.0

    @property
    def final(self) -> float | None:
        """Mean loss of the last `LAST` steps; None where none was taken."""
        last = [step.loss for step in self.steps[-LAST:]]
        return math.fsum(last) / len(last) if last else None

    @property
    def complete(self) -> bool:
        """Whether it took every step."""
        return not self.error and len(self.steps) == self.task.steps

    @property
    def judged(self) -> bool:
        """Whether its stages are judged."""
        return self.task.judged and self.task.recipe is not None

    @property
    def wrong(self) -> list[str]:
        """A sentence for each wrong stage that is named."""
        return [words for step in self.steps for words in step.wrong]

    @property
    def agreeing(self) -> int:
        """Steps of which every stage is right, and something was compared."""
        return sum(step.compared > 0 and not step.mismatches for step in self.steps)

    @property
    def apart(self) -> float | None:
        """The largest distance of its loss from the reference's of the same weights; None where none was computed."""
        return max((abs(step.loss - step.beside) for step in self.steps if step.beside is not None), default=None)

    def learned(self, entropy: float) -> bool:
        """Whether the final loss is below what no model reaches whose layers do nothing."""
        return self.final is not None and self.final < entropy

    def passed(self, entropy: float) -> bool:
        """Whether it took every step, all of them agree where they are judged, and it learned."""
        agrees = not self.judged or self.agreeing == self.task.steps
        return self.complete and agrees and self.learned(entropy)
