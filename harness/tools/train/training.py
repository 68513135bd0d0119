"""Result of a training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from narrowgauge.harness.tools.train.train import TrainingStep, TrainingTask

LAST = 20
"""Number of last steps averaged for the final loss."""


@dataclass
class Training:
    """Steps and end of a training."""

    task: TrainingTask
    steps: list[TrainingStep] = field(default_factory=list)
    error: str = ""
    """Why the training ended early."""
    seconds: float = 0.0

    @property
    def final(self) -> float | None:
        """Mean loss of the last `LAST` steps, or None without steps."""
        last = [step.loss for step in self.steps[-LAST:]]
        return math.fsum(last) / len(last) if last else None

    @property
    def complete(self) -> bool:
        """Whether the training took all its steps."""
        return not self.error and len(self.steps) == self.task.steps

    @property
    def judged(self) -> bool:
        """Whether the stages are judged."""
        return self.task.judged and self.task.recipe is not None

    @property
    def wrong(self) -> list[str]:
        """Sentences for the named wrong stages."""
        return [sentence for step in self.steps for sentence in step.wrong]

    @property
    def agreeing(self) -> int:
        """Number of steps with compared elements and no wrong stage."""
        return sum(step.compared > 0 and not step.mismatches for step in self.steps)

    @property
    def loss_difference(self) -> float | None:
        """Largest distance of the loss from the reference's loss with the same weights, or None if it was not
        computed."""
        return max(
            (abs(step.loss - step.reference_loss) for step in self.steps if step.reference_loss is not None),
            default=None,
        )

    def learned(self, entropy: float) -> bool:
        """Whether the final loss is below the entropy, which no model with ineffective layers reaches."""
        return self.final is not None and self.final < entropy

    def too_short(self, trainings: Iterable[Training], entropy: float) -> bool:
        """Whether the training is right and its number of steps is too small to learn: it is complete, agrees in every
        judged step, has not learned, and the reference in high precision has not learned in as many steps either."""
        agrees = not self.judged or self.agreeing == self.task.steps
        return (
            self.complete and agrees and not self.learned(entropy) and math.isfinite(self.final or math.nan)
            and any(
                other.task.recipe is None and other.task.backend == "reference" and other.complete
                and other.task.steps == self.task.steps and not other.learned(entropy)
                for other in trainings
            )
        )  # fmt: skip

    def passed(self, entropy: float) -> bool:
        """Whether the training is complete, agrees in every judged step, and learned."""
        agrees = not self.judged or self.agreeing == self.task.steps
        return self.complete and agrees and self.learned(entropy)
