"""Trials of the assumption of a proof: contents, views, shapes and repeated calls."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from narrowgauge.harness.backends.backend import BackendError, Unsupported
from narrowgauge.harness.certify.certificate import Trial
from narrowgauge.harness.certify.compare import Tried
from narrowgauge.harness.certify.inputs.contents import CONTENTS, Content, shapes
from narrowgauge.harness.certify.inputs.space import Grid, Numbers
from narrowgauge.harness.certify.wrong import Feature, find_rule
from narrowgauge.harness.inputs.inputs import laid_out
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.report.text import number

_VIEWS = ("offset-2", "offset-8", "pitched", "strided", "transposed")
_ROUNDS = 4
"""Calls of every trial, with different tensor amaxes."""


def trials(calls: Tried, numbers: Numbers, scale: torch.Tensor | None, seed: int) -> Iterator[Trial]:
    recipe, grid = calls.recipe, Grid.of(calls.recipe)
    generator = torch.Generator().manual_seed(seed + 1)
    rows = max(1, calls.elements // (grid.size * grid.across))
    content = Content(recipe, numbers, rows * grid.across, generator)
    for name, made in CONTENTS.items():
        trial = Trial(name)
        for _ in range(_ROUNDS):
            _try(calls, calls.input_of(grid.matrix(numbers.tensor(made(content)))), scale, trial)
        yield trial
    views = Trial("views of other memory: " + ", ".join(_VIEWS))
    x = calls.input_of(grid.matrix(numbers.tensor(CONTENTS["random numbers, the amax anywhere"](content))))
    for view in _VIEWS:
        _try(calls, laid_out(x[:, : x.shape[1] // 2], view), scale, views)
    yield views
    yield _shapes(calls, content, scale)


def _shapes(calls: Tried, content: Content, scale: torch.Tensor | None) -> Trial:
    trial, wrong = Trial(""), []
    tried = [shape for shape in shapes(content.recipe) if math.prod(shape) <= 4 * calls.elements]
    for rows, columns in tried:
        count = -(-rows * columns // content.size)
        blocks = Content(content.recipe, content.numbers, count, content.generator).random()
        x = content.numbers.tensor(blocks.flatten()[: rows * columns]).view(rows, columns)
        wrong.append(_try(calls, calls.input_of(x), scale, trial))
    trial.name = f"{len(tried)} shapes: M from 1 to {max(rows for rows, _ in tried)}, K from 1 to "
    trial.name += str(max(columns for _, columns in tried))
    if any(wrong):
        rule = find_rule(torch.tensor(wrong), _shape_features(tried))
        failing = [f"{rows}x{columns}" for (rows, columns), is_wrong in zip(tried, wrong, strict=True) if is_wrong]
        named = f"{', '.join(failing[:5])}{' and others' if len(failing) > 5 else ''}"
        trial.note = f"{len(failing)} shapes, {named}" + (f"; exactly these with {rule}" if rule else "")
    return trial


def _shape_features(tried: list[tuple[int, int]]) -> dict[str, Feature]:
    sizes = torch.tensor(tried)
    features = {}
    for axis, name in enumerate("MK"):
        features[name] = Feature(sizes[:, axis].double())
        for step in (128, 64, 32, 16, 2):
            divisible = (sizes[:, axis] % step == 0).long()
            features[f"{name} a multiple of {step}"] = Feature(divisible, ("no", "yes"))
    return features


def _try(calls: Tried, x: torch.Tensor, scale: torch.Tensor | None, trial: Trial) -> bool:
    """Judge a call of a trial. Returns whether a byte is wrong."""
    trial.calls += 1
    try:
        blocks, wrong = calls.judged(x, calls.options(scale))
    except ValueError:  # the recipe refuses the amax
        return False
    except (BackendError, Unsupported) as error:
        trial.refused += 1
        trial.note = trial.note or escape(str(error)).splitlines()[0]
        return False
    trial.blocks += blocks
    trial.wrong += wrong
    return wrong > 0


class Repeated:
    """A call whose result is compared with the results of the same call later."""

    def __init__(self, calls: Tried, numbers: Numbers, scale: torch.Tensor | None, seed: int) -> None:
        grid = Grid.of(calls.recipe)
        content = Content(calls.recipe, numbers, 16 * grid.across, torch.Generator().manual_seed(seed + 2))
        self._calls, self._options = calls, calls.options(scale)
        self._x = calls.input_of(grid.matrix(numbers.tensor(content.random())))
        self._first = calls.count
        self._trial = Trial("")
        self._judge()

    def _judge(self) -> None:
        blocks, wrong = self._calls.judged(self._x, self._options)
        self._trial.calls += 1
        self._trial.blocks += blocks
        self._trial.wrong += wrong

    def again(self) -> Trial:
        """The trial, with two further calls."""
        self._judge()
        self._judge()
        self._trial.name = f"the same call before and behind {self._calls.count - self._first - 3} others, and twice"
        return self._trial


def tried_sentence(depends: str, trials: list[Trial]) -> str:
    """The assumption, and how often it was tried. `depends`: what scales and codes depend on alone."""
    blocks, calls = sum(trial.blocks for trial in trials), sum(trial.calls for trial in trials)
    return (
        f"Assumption: {depends}; not on other numbers, places, shapes, views or earlier calls. Tried on "
        f"{number(blocks)} blocks in {number(calls)} calls."
    )


def outside(trials: list[Trial]) -> list[str]:
    refused = [f"{trial.name}: the kernel refuses {number(trial.refused)} calls" for trial in trials if trial.refused]
    return [
        "inputs that keep the assumption from holding and that no trial has: larger shapes than those of the trials, "
        "several calls at the same time, a given amax, other layouts of scales, and patterns in several numbers that "
        "random blocks reach with less than one in a million blocks",
        *refused,
    ]
