"""Figure of a session: losses by step for each recipe, with the losses of the reference and of high precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.harness.tools.train.training import Training

WIDTH, HEIGHT = 320, 180
"""Size of a recipe's plot in SVG units."""
_ROUND = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Allowed distances of axis marks, in nats."""


@dataclass(frozen=True)
class LossCurve:
    """Losses of a training."""

    name: str
    """Label of the curve."""
    kind: str
    """CSS class: backend, reference or high-precision."""
    points: str
    """Points of an SVG polyline."""


@dataclass(frozen=True)
class RecipePanel:
    """Losses under a recipe."""

    recipe: str
    lines: list[LossCurve]


@dataclass(frozen=True)
class LossFigure:
    """All panels, with the same axes."""

    panels: list[RecipePanel]
    marks: list[tuple[str, float]]
    """Labels of the vertical axis, with their distances from the top."""
    steps_marks: list[tuple[str, float]]
    """Labels of the horizontal axis, with their distances from the left."""
    entropy: float
    """Distance from the top of the entropy line, which a model with effective layers must pass."""
    steps: int


def loss_figure(trainings: Sequence[Training], entropy: float, steps: int) -> LossFigure:
    """A panel per recipe, all with the high-precision curves. Losses that are not finite are omitted."""
    losses = [step.loss for training in trainings for step in training.steps if math.isfinite(step.loss)]
    top = max([*losses, entropy]) * 1.02
    high_precision = [training for training in trainings if training.task.recipe is None]
    recipes = dict.fromkeys(training.task.recipe for training in trainings if training.task.recipe is not None)
    panels = [
        # High precision first: further curves are drawn on top.
        RecipePanel(
            recipe,
            [
                _loss_curve(training, top, steps)
                for training in [*high_precision, *_trainings_under(trainings, recipe)]
                if training.steps
            ],
        )
        for recipe in recipes
    ]
    gap = next((gap for gap in _ROUND if top / gap <= 5), top)
    marks = [(f"{gap * number:g}", _height_below_top(gap * number, top)) for number in range(int(top / gap) + 1)]
    return LossFigure(panels, marks, _step_marks(steps), _height_below_top(entropy, top), steps)


def _step_marks(steps: int) -> list[tuple[str, float]]:
    """Numbers of steps, counted from 1, at round distances: at most five."""
    last = max(1, steps - 1)
    gap = next(gap for power in range(10) for gap in (10**power, 2 * 10**power, 5 * 10**power) if steps <= 4 * gap)
    return [
        (str(step), round(WIDTH * (step - 1) / last, 1)) for step in dict.fromkeys([1, *range(gap, steps + 1, gap)])
    ]


def _trainings_under(trainings: Sequence[Training], recipe: str) -> list[Training]:
    return [training for training in trainings if training.task.recipe == recipe]


def _loss_curve(training: Training, top: float, steps: int) -> LossCurve:
    points = " ".join(
        f"{WIDTH * number / max(1, steps - 1):.4g},{_height_below_top(step.loss, top)}"
        for number, step in enumerate(training.steps)
        if math.isfinite(step.loss)
    )
    task = training.task
    kind = "reference" if task.backend == "reference" else "backend"
    if task.recipe is None:
        return LossCurve(f"{task.backend}, high precision", f"{kind} plain", points)
    return LossCurve(task.backend, kind, points)


def _height_below_top(loss: float, top: float) -> float:
    return round(HEIGHT * (1 - loss / top), 1)
