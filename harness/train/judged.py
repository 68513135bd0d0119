"""A layer that is watched while it trains: what it reports of a step, and the stages of that step."""

from __future__ import annotations

from typing import Any

import torch

from harness.backend import Backend
from harness.checks.chance import decide
from harness.operations.black_box import makes_own_bits
from harness.operations.linear_stages import Ground, State
from harness.operations.module_run import Plan, Step
from harness.operations.outcome import Outcome
from harness.operations.product import order_of
from harness.operations.quantize import rotates_freely
from harness.operations.transformer_stages import TransformerStages
from harness.parameters import transformer
from harness.train.model import Size
from reference.training import TrainingRecipe


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
            device = next(layer.parameters()).device
            for one in layers:
                self._states[one.prefix] = (
                    torch.zeros(training.history, 3, device=device), torch.ones(3, device=device)
                )  # fmt: skip
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

        `x` and `y` (B, S, hidden): the layer's input and output, each with its gradient. Their values, and the
        gradients of the parameters, are judged as the layer gave them, whatever it reported.
        """
        step = self._step
        self.layer.observer = None
        assert y.grad is not None
        step.x, step.dy = x.detach(), y.grad
        parameters = dict(self.layer.named_parameters())
        given: dict[str, torch.Tensor | None] = {"y": y, "dx": x.grad}
        for one in self.plan.layers:
            names = {"dw": one.weights[0], "dbias": one.biases[0], "dgamma": one.gamma, "dbeta": one.beta}
            given |= {one.prefix + what: parameters[name].grad for what, name in names.items() if name}
        for name, value in given.items():
            step.seen[name] = []
            step.report(name, value)
        own = makes_own_bits(self.backend, self.plan.training.grad)
        ground = Ground(
            self.plan, step, Outcome(), order_of(self.backend), free=rotates_freely(self.backend), own=own
        )  # fmt: skip
        stages = TransformerStages(ground, self._states)
        stages.forward(step.x.flatten(0, 1))
        stages.backward(step.dy.flatten(0, 1))
        self._states = stages.end()
        decide(ground.outcome.stages, self.sharing)
        return ground.outcome, list(ground.unseen)
