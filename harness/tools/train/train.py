"""A training: steps of a backend's layers under a recipe, with every stage of every step judged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported, load_backend
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.cases.cost import room
from narrowgauge.harness.hosts.remote_host import HostSettings, RemoteHost
from narrowgauge.harness.hosts.starter import Channel, starter
from narrowgauge.harness.running.worker import LOAD
from narrowgauge.harness.tools.train import corpus
from narrowgauge.harness.tools.train.hosted_layer import HostedLayer, HostedLayers
from narrowgauge.harness.tools.train.model import SEEDS, Adam, Model, Size
from narrowgauge.harness.tools.train.observed_layer import ObservedLayer
from narrowgauge.spec.modules.autocast import autocast
from narrowgauge.spec.modules.training import training_recipe

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
    timeout: float = 300.0
    """Seconds that the layers may take for a step, with its judging."""


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


def train(task: TrainingTask, hosts: Channel | None = None, workers: int = 1) -> Iterator[TrainingStep]:
    """Steps of a training. The layers of the backend run in a kernel host. This process has the weights, the rest of
    the model and the optimizer, and judges the layers.

    `hosts`: channel to a starter, None: the starter of this process. `workers`: number of
    trainings that share the cores. Raises BackendError if the backend raises, its host ends, or the layer is missing.
    """
    settings = HostSettings(task.backend, task.device, workers=workers)
    with closing(hosts or Channel(starter().connect())) as channel:
        host = RemoteHost(settings, channel, load=max(LOAD, task.timeout))
        try:
            host.begin_case(task.timeout, room(task.device))
            yield from _steps(task, Backend(host))
        except (HostLost, Unsupported) as error:
            raise BackendError(str(error)) from error
        finally:
            host.close()


def _steps(task: TrainingTask, backend: Backend) -> Iterator[TrainingStep]:
    device = torch.device(task.device)
    text = corpus.make(task.seed)
    characters = len(text.characters)
    layers = HostedLayers(backend, task.recipe, observed=task.judged and task.recipe is not None)
    model = Model(layers, task.size, characters, seed=task.seed, device=device)
    oracle = Model(load_backend("reference"), task.size, characters, seed=task.seed, device=device)
    observed = _observed_layers(task, model, backend)
    optimizer = Adam(model, RATE)
    for number, texts in enumerate(text.batches(task.steps, task.size.batch, task.size.sequence, task.seed)):
        batch = texts.to(device)
        backend.host.begin_case(task.timeout, room(task.device))
        for layer in observed:
            layer.begin(number)
        try:
            loss = model.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
        except (BackendError, Unsupported, HostLost) as error:
            raise BackendError(f"step {number + 1}: {error}") from error
        reference_loss = _reference_loss(oracle, model, batch, task.recipe) if task.judged else None
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
        if isinstance(layer, HostedLayer)
    ]


def _reference_loss(oracle: Model, model: Model, pieces: torch.Tensor, recipe: str | None) -> float:
    """Loss of the reference with the current weights of the model, and with its delayed scales before the step."""
    scales = {
        f"layers.{number}.{name}": value
        for number, layer in enumerate(model.layers)
        if isinstance(layer, HostedLayer)
        for name, value in layer.state.items()
    }
    try:
        oracle.load_state_dict(scales | model.state_dict(), strict=False)  # a backend's state may have extra entries
    except RuntimeError as error:
        raise BackendError(f"the buffers of TransformerLayer cannot be read: {error}") from error
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
