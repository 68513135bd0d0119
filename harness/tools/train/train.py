"""One training: so many steps of a backend's layers under a recipe, every stage of every step judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported, load_backend, place
from narrowgauge.harness.tools.train import corpus
from narrowgauge.harness.tools.train.model import SEEDS, Adam, Model, Size
from narrowgauge.harness.tools.train.observed_layer import Watched
from narrowgauge.spec.autocast import autocast
from narrowgauge.spec.training import training_recipe

RATE = 2e-3
"""Of Adam."""
SAID = 3
"""Wrong stages of a step that are named; the rest are counted."""


@dataclass(frozen=True)
class Task:
    """What is trained."""

    recipe: str | None
    """Name of a training recipe; None is high precision."""
    backend: str = "native"
    device: str = "cpu"
    seed: int = 0
    """Of the text, the weights, the batches and the layers' own rounding."""
    steps: int = 200
    size: Size = field(default_factory=Size)
    judged: bool = True
    """Whether every stage is judged, and the reference computes each loss from the same weights. In high precision
    nothing is quantized, and no stage judged."""
    sharing: int = 1
    """How many steps of layers share the false alarms of the session."""


@dataclass
class Step:
    """One step of a training."""

    loss: float
    beside: float | None = None
    """Loss of the reference from the same weights."""
    stages: int = 0
    """Stages that were compared."""
    compared: int = 0
    """Elements of them."""
    wrong: list[str] = field(default_factory=list)
    """A sentence for each wrong stage, the first `SAID` of them."""
    mismatches: int = 0
    """Wrong stages."""
    unseen: list[str] = field(default_factory=list)
    """What the layers did not report, and was not compared."""


def train(task: Task) -> Iterator[Step]:
    """The steps of a training, as they come. Raises BackendError where the backend does, or has no such layer."""
    device = torch.device(task.device)
    backend = load_backend(task.backend, task.device)
    text = corpus.make(task.seed)
    characters = len(text.characters)
    try:
        model = Model(backend, task.size, characters, seed=task.seed, device=device)
    except Unsupported as error:
        raise BackendError(str(error)) from error
    oracle = Model(load_backend("reference"), task.size, characters, seed=task.seed, device=device)
    watched = _watched(task, model, backend)
    optimizer = Adam(model, RATE)
    for number, pieces in enumerate(text.batches(task.steps, task.size.batch, task.size.sequence, task.seed)):
        there = pieces.to(device)
        beside = _beside(oracle, model, there, task.recipe) if task.judged else None
        for layer in watched:
            layer.begin(number)
        try:
            with autocast(task.recipe):
                loss = model.loss(there)
            loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            raise BackendError(f"step {number + 1} raised {type(error).__name__}: {error}{place(error)}") from error
        step = Step(loss.item(), beside)
        for name, layer in enumerate(watched):
            _judge(step, layer, name, model.between)
        optimizer.step()
        yield step


def _watched(task: Task, model: Model, backend: Backend) -> list[Watched]:
    """The layers that are judged."""
    if not task.judged or task.recipe is None:
        return []
    training = training_recipe(task.recipe)
    return [
        Watched(layer, task.size, training, backend, seed=task.seed + SEEDS * number, sharing=task.sharing)
        for number, layer in enumerate(model.layers)
    ]


def _beside(oracle: Model, model: Model, pieces: torch.Tensor, recipe: str | None) -> float:
    """The reference's loss from the weights, and the scales of delayed scaling, that a model has now."""
    oracle.load_state_dict(model.state_dict(), strict=False)  # a backend may keep more in it than the reference does
    with torch.no_grad(), autocast(recipe):
        return oracle.loss(pieces).item()


def _judge(step: Step, layer: Watched, number: int, between: list[torch.Tensor]) -> None:
    outcome, unseen = layer.judge(between[number], between[number + 1])
    compared = [stage for stage in outcome.stages if stage.compared]
    wrong = [stage for stage in outcome.stages if not stage.right]
    step.stages += len(compared)
    step.compared += sum(stage.compared for stage in compared)
    step.mismatches += len(wrong)
    sentences = [f"layer {number + 1}, {stage.stage}: {stage.sentence}" for stage in wrong]
    step.wrong += sentences[: SAID - len(step.wrong)]
    step.unseen += [f"layer {number + 1} {name}" for name in unseen]
