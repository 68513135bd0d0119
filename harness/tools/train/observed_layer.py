"""A layer observed during training: its reported values, and the stages of each step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.module_driver import Plan, Step
from narrowgauge.harness.cases.layers import transformer
from narrowgauge.harness.checks.statistics.decision import decide
from narrowgauge.harness.operations.gemm.product import order_of
from narrowgauge.harness.operations.modules.delayed import initial_states
from narrowgauge.harness.operations.modules.ground import Ground
from narrowgauge.harness.operations.modules.transformer import TransformerStages
from narrowgauge.harness.operations.quantize.judge import rotates_freely
from narrowgauge.harness.operations.stages.black_box import makes_own_bits
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.tools.train.hosted_layer import HostedLayer
from narrowgauge.harness.tools.train.model import Size
from narrowgauge.spec.modules.training import TrainingRecipe


class ObservedLayer:
    """A bfloat16 transformer layer of a backend, with the expected state between steps."""

    def __init__(
        self, layer: HostedLayer, size: Size, training: TrainingRecipe, backend: Backend, *, seed: int, sharing: int
    ) -> None:
        """`sharing`: number of layer steps that share the false alarms of the session (`decide`)."""
        layers = transformer(size.hidden, size.ffn, "layer")
        self.layer, self.backend, self.sharing = layer, backend, sharing
        self.plan = Plan("TransformerLayer", training, layers, torch.bfloat16, bias=True, seed=seed, heads=size.heads)
        self._states = initial_states(training, layers, torch.device("cpu"))
        nothing = torch.empty(0)
        self._step = Step(0, nothing, nothing, {})

    def begin(self, number: int) -> None:
        """Observe the layer's step with this number, from its next forward. The current parameters are copied."""
        parameters = dict(self.layer.named_parameters())
        parameter_values = {
            name: parameters[name].detach().clone() for linear in self.plan.layers for name in linear.shapes(bias=True)
        }
        nothing = torch.empty(0)  # input and gradient are known after the step
        self._step = Step(number, nothing, nothing, parameter_values)

    def judge(self, x: torch.Tensor, y: torch.Tensor) -> tuple[Outcome, list[str]]:
        """Stages of the step after its backward, and the names of values that were not reported.

        Stages are judged on the host, on every device: a step has some ten thousand small operations, and several
        processes that launch them on a GPU block one another. Beside an H200, nine concurrent trainings on 16 cores
        take 0.6 to 1.1 s per step on the host; judged on the GPU, none of the nine reached 12 steps in 30 s.

        `x` and `y` (B, S, hidden): input and output of the layer, with gradients. Their values and the gradients of the
        parameters replace reported values of the same name.
        """
        step = self._step
        step.seen = self.layer.seen
        assert y.grad is not None
        parameters = dict(self.layer.named_parameters())
        results: dict[str, torch.Tensor | None] = {"y": y, "dx": x.grad}
        for linear in self.plan.layers:
            names = {"dw": linear.weights[0], "dbias": linear.biases[0], "dgamma": linear.gamma, "dbeta": linear.beta}
            results |= {
                linear.prefix + result_name: parameters[name].grad for result_name, name in names.items() if name
            }
        for name, value in results.items():
            step.seen[name] = []
            step.report(name, value)
        step = Step(step.number, on_host(x), on_host(y.grad), on_host(step.parameters), seen=on_host(step.seen))
        own_random_bits = makes_own_bits(self.backend, self.plan.training.grad)
        ground = Ground(
            self.plan,
            step,
            Outcome(),
            partial(order_of, self.backend),
            free=rotates_freely(self.backend),
            own=own_random_bits,
            figures=False,
        )
        stages = TransformerStages(ground, self._states)
        stages.forward(step.x.flatten(0, 1))
        stages.end_forward()
        stages.backward(step.dy.flatten(0, 1))
        stages.end()
        decide(ground.outcome.stages, self.sharing)
        return ground.outcome, list(ground.unseen)


def on_host(value: Any) -> Any:
    """A value with all its tensors on the host, also in lists and mappings."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, list):
        return [on_host(part) for part in value]
    if isinstance(value, dict):
        return {name: on_host(part) for name, part in value.items()}
    return value
