"""A training: steps of a backend's layers under a recipe, with every stage of every step judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported, error_location, load_backend
from narrowgauge.harness.tools.train import corpus
from narrowgauge.harness.tools.train.model import SEEDS, Adam, Model, Size
from narrowgauge.harness.tools.train.observed_layer import ObservedLayer
from narrowgauge.spec.autocast import autocast
from narrowgauge.spec.training import training_recipe

RATE = 2e-3
"""Learning rate of Adam."""
NAMED_STAGES = 3
"""Largest number of wrong stages named for a step. All are counted."""


@dataclass(frozen=True)
class TrainingTask:
    """Settings of a training."""

    recipe: str | None
    """Name of a training recipe. None: high precision."""
    backend: str = "native"
    device: str = "cpu"
    seed: int = 0
    """Seed of the text, the weights, the batches and the layers' own rounding."""
    steps: int = 200
    size: Size = field(default_factory=Size)
    judged: bool = True
    """Whether every stage is judged, and each loss is also computed by the reference with the same weights. High
    precision has no quantized stages to judge."""
    sharing: int = 1
    """Number of layer steps that share the false alarms of the session."""


@dataclass
class TrainingStep:
    """A step of a training."""

    loss: float
    reference_loss: float | None = None
    """Loss of the reference with the same weights."""
    stages: int = 0
    """Number of compared stages."""
    compared: int = 0
    """Number of compared elements."""
    wrong: list[str] = field(default_factory=list)
    """A sentence for each of the first `NAMED_STAGES` wrong stages."""
    mismatches: int = 0
    """Number of wrong stages."""
    not_reported: list[str] = field(default_factory=list)
    """Values missing in the reports of the layers, not compared."""


def train(task: TrainingTask) -> Iterator[TrainingStep]:
    """Steps of a training. Raises BackendError if the backend raises or has no such layer."""
    device = torch.device(task.device)
    backend = load_backend(task.backend, task.device)
    text = corpus.make(task.seed)
    characters = len(text.characters)
    try:
        model = Model(backend, task.size, characters, seed=task.seed, device=device)
    except Unsupported as error:
        raise BackendError(str(error)) from error
    oracle = Model(load_backend("reference"), task.size, characters, seed=task.seed, device=device)
    observed = _observed_layers(task, model, backend)
    optimizer = Adam(model, RATE)
    for number, texts in enumerate(text.batches(task.steps, task.size.batch, task.size.sequence, task.seed)):
        batch = texts.to(device)
        reference_loss = _reference_loss(oracle, model, batch, task.recipe) if task.judged else None
        for layer in observed:
            layer.begin(number)
        try:
            with autocast(task.recipe):
                loss = model.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            raise BackendError(
                f"step {number + 1} raised {type(error).__name__}: {error}{error_location(error)}"
            ) from error
        step = TrainingStep(loss.item(), reference_loss)
        for name, layer in enumerate(observed):
            _judge(step, layer, name, model.between)
        optimizer.step()
        yield step


def _observed_layers(task: TrainingTask, model: Model, backend: Backend) -> list[ObservedLayer]:
    """Observed layers: all layers of a judged training, else none."""
    if not task.judged or task.recipe is None:
        return []
    training = training_recipe(task.recipe)
    return [
        ObservedLayer(layer, task.size, training, backend, seed=task.seed + SEEDS * number, sharing=task.sharing)
        for number, layer in enumerate(model.layers)
    ]


def _reference_loss(oracle: Model, model: Model, pieces: torch.Tensor, recipe: str | None) -> float:
    """Loss of the reference with the current weights and delayed scales of the model."""
    oracle.load_state_dict(model.state_dict(), strict=False)  # a backend's state may have extra entries
    with torch.no_grad(), autocast(recipe):
        return oracle.loss(pieces).item()


def _judge(step: TrainingStep, layer: ObservedLayer, number: int, between: list[torch.Tensor]) -> None:
    outcome, not_reported = layer.judge(between[number], between[number + 1])
    compared = [stage for stage in outcome.stages if stage.compared]
    wrong = [stage for stage in outcome.stages if not stage.passed]
    step.stages += len(compared)
    step.compared += sum(stage.compared for stage in compared)
    step.mismatches += len(wrong)
    sentences = [f"layer {number + 1}, {stage.stage}: {stage.sentence}" for stage in wrong]
    step.wrong += sentences[: NAMED_STAGES - len(step.wrong)]
    step.not_reported += [f"layer {number + 1} {name}" for name in not_reported]
