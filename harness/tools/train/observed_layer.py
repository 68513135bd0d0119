"""A layer that is watched while it trains: what it reports of a step, and the stages of that step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.parameters import transformer
from narrowgauge.harness.checks.statistics.decide import decide
from narrowgauge.harness.operations.modules.driver import Plan, Step
from narrowgauge.harness.operations.modules.linear import Ground, State
from narrowgauge.harness.operations.modules.transformer import TransformerStages
from narrowgauge.harness.operations.quantize import rotates_freely
from narrowgauge.harness.operations.stages.black_box import makes_own_bits
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.product import order_of
from narrowgauge.harness.tools.train.model import Size
from narrowgauge.spec.training import TrainingRecipe


class Watched:
    """A transformer layer of a backend, bfloat16, and what is known of it from step to step."""

    def __init__(
        self, layer: Any, size: Size, training: TrainingRecipe, backend: Backend, *, seed: int, sharing: int
    ) -> None:
        """`sharing`: how many steps of layers share the false alarms of the session (`decide`)."""
        layers = transformer(size.hidden, size.ffn, "layer")
        self.layer, self.backend, self.sharing = layer, backend, sharing
        self.plan = Plan("TransformerLayer", training, layers, torch.bfloat16, bias=True, seed=seed, heads=size.heads)
        self._states: dict[str, State | None] = {}
        if training.history:
            self._states = {one.prefix: (torch.zeros(training.history, 3), torch.ones(3)) for one in layers}
        nothing = torch.empty(0)
        self._step = Step(0, nothing, nothing, {})

    def begin(self, number: int) -> None:
        """Watch the layer's step of this number, whose forward comes next, with the parameters that it has now."""
        parameters = dict(self.layer.named_parameters())
        given = {name: parameters[name].detach().clone() for one in self.plan.layers for name in one.shapes(bias=True)}
        nothing = torch.empty(0)  # input and gradient are known when the step is over
        self._step = Step(number, nothing, nothing, given)
        self.layer.observer = self._step.report

    def judge(self, x: torch.Tensor, y: torch.Tensor) -> tuple[Outcome, list[str]]:
        """The stages of the step, whose backward is over, and what was not reported.

        They are judged on the host, whatever the device: a step is some ten thousand small operations, and several
        processes that launch them take turns on one GPU. Beside an H200, nine trainings at once on 16 cores take 0.6 to
        1.1 s a step so; where they were judged on the GPU, none of the nine came to 12 steps in 30 s.

        `x` and `y` (B, S, hidden): the layer's input and output, each with its gradient. Their values, and the
        gradients of the parameters, are judged as the layer gave them, whatever it reported.
        """
        step = self._step
        self.layer.observer = None
        assert y.grad is not None
        parameters = dict(self.layer.named_parameters())
        given: dict[str, torch.Tensor | None] = {"y": y, "dx": x.grad}
        for one in self.plan.layers:
            names = {"dw": one.weights[0], "dbias": one.biases[0], "dgamma": one.gamma, "dbeta": one.beta}
            given |= {one.prefix + what: parameters[name].grad for what, name in names.items() if name}
        for name, value in given.items():
            step.seen[name] = []
            step.report(name, value)
        step = Step(step.number, on_host(x), on_host(y.grad), on_host(step.parameters), seen=on_host(step.seen))
        own = makes_own_bits(self.backend, self.plan.training.grad)
        ground = Ground(
            self.plan, step, Outcome(), partial(order_of, self.backend), free=rotates_freely(self.backend), own=own,
            figures=False,
        )  # fmt: skip
        stages = TransformerStages(ground, self._states)
        stages.forward(step.x.flatten(0, 1))
        stages.backward(step.dy.flatten(0, 1))
        self._states = stages.end()
        decide(ground.outcome.stages, self.sharing)
        return ground.outcome, list(ground.unseen)


def on_host(value: Any) -> Any:
    """A value whose tensors, those of its lists and mappings too, lie on the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, list):
        return [on_host(part) for part in value]
    if isinstance(value, dict):
        return {name: on_host(part) for name, part in value.items()}
    return value
