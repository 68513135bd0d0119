"""The figure of a session: for each recipe its losses by step, beside those of the reference and in high precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.harness.tools.train.training import Training

WIDTH, HEIGHT = 320, 180
"""Of the plot of one recipe, in the units of its SVG."""
_ROUND = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Distances of marks, in nats."""


@dataclass(frozen=True)
class Line:
    """The losses of one training."""

    name: str
    """Whose they are."""
    kind: str
    """Its class in the page: backend, reference or high-precision."""
    points: str
    """Of a polyline."""


@dataclass(frozen=True)
class Panel:
    """The losses under one recipe."""

    recipe: str
    lines: list[Line]


@dataclass(frozen=True)
class Figure:
    """All panels, on the same axes."""

    panels: list[Panel]
    marks: list[tuple[str, float]]
    """Labels of the vertical axis, and how far below the top."""
    entropy: float
    """How far below the top the line lies that says what layers have to do better than."""
    steps: int


def figure(trainings: Sequence[Training], entropy: float, steps: int) -> Figure:
    """A panel for each recipe, with the curves of high precision in each; losses that are not finite have no place."""
    losses = [step.loss for training in trainings for step in training.steps if math.isfinite(step.loss)]
    top = max([*losses, entropy]) * 1.02
    plain = [training for training in trainings if training.task.recipe is None]
    recipes = dict.fromkeys(training.task.recipe for training in trainings if training.task.recipe is not None)
    panels = [
        # In high precision first: the others are drawn over it.
        Panel(recipe, [_line(one, top, steps) for one in [*plain, *_of(trainings, recipe)] if one.steps])
        for recipe in recipes
    ]
    gap = next((gap for gap in _ROUND if top / gap <= 5), top)
    marks = [(f"{gap * number:g}", _down(gap * number, top)) for number in range(int(top / gap) + 1)]
    return Figure(panels, marks, _down(entropy, top), steps)


def _of(trainings: Sequence[Training], recipe: str) -> list[Training]:
    return [training for training in trainings if training.task.recipe == recipe]


def _line(training: Training, top: float, steps: int) -> Line:
    points = " ".join(
        f"{WIDTH * number / max(1, steps - 1):.4g},{_down(step.loss, top)}"
        for number, step in enumerate(training.steps)
        if math.isfinite(step.loss)
    )
    task = training.task
    kind = "reference" if task.backend == "reference" else "backend"
    if task.recipe is None:
        return Line(f"{task.backend}, high precision", f"{kind} plain", points)
    return Line(task.backend, kind, points)


def _down(loss: float, top: float) -> float:
    return round(HEIGHT * (1 - loss / top), 1)
