"""Running a module: its steps of forward and backward, and everything that it reports of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from narrowgauge.harness.backends.results import QUANTIZED_PARTS, BackendError, dtype_name
from narrowgauge.harness.backends.transfer import to_device
from narrowgauge.harness.cases.modules import Layer
from narrowgauge.spec.autocast import autocast, checkpoint
from narrowgauge.spec.training import TrainingRecipe

Tensors = dict[str, torch.Tensor]


class Caller(Protocol):
    """Calls functions of a backend. Raises Unsupported, or BackendError with the function's message."""

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Result of a method of the backend."""

    def run(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Result of a function of the backend's module; `name` is for messages."""


LEARNING_RATE = 2.0**-8
"""Of the plain SGD between steps: a power of two, so that it adds no rounding of its own to a gradient."""
HALVES = ("x", "x columnwise", "w", "w columnwise", "dy", "dy columnwise")
"""What a layer reports that is quantized."""


@dataclass(frozen=True)
class Plan:
    """What is run of a module, and under which recipe."""

    kind: str
    """The door: `Linear`, `LayerNormLinear`, `GroupedLinear` or `TransformerLayer`."""
    training: TrainingRecipe
    layers: list[Layer]
    dtype: torch.dtype
    bias: bool
    seed: int = 0
    """Of the module's stochastic rounding."""
    steps: int = 1
    sections: tuple[int, ...] = ()
    heads: int = 1
    eps: float = 1e-5
    accumulate: bool = False
    quantized_parameters: bool = False
    delay_wgrad: bool = False
    recompute: bool = False

    @property
    def weights(self) -> list[str]:
        """Names of all weights that are quantized."""
        return [name for layer in self.layers for name in layer.weights]


@dataclass
class Step:
    """One forward and backward: what went in, and what the module reported or gave."""

    number: int
    """Of the steps of this module, from 0: how often its backward ran before."""
    x: torch.Tensor
    dy: torch.Tensor
    parameters: dict[str, torch.Tensor]
    """As they were in this step."""
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    """The main gradient of every weight before it, where it accumulates."""
    seen: dict[str, list[Any]] = field(default_factory=dict)
    """By name, what was reported, each time that it was; and what the module gave: `y`, gradients."""
    early: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """Gradients of weights before `backward_dw`, where they are to wait for it."""

    def last(self, name: str) -> Any:
        """What was reported last under a name, or None."""
        return self.seen[name][-1] if self.seen.get(name) else None

    def at(self, home: torch.device) -> Step:
        """The same on a device."""
        held = {name: to_device(getattr(self, name), home) for name in ("parameters", "before", "seen", "early")}
        return Step(self.number, self.x.to(home), self.dy.to(home), **held)

    def report(self, name: str, value: Any) -> None:
        """Be an observer: keep a copy of the value, which the module may go on to change."""
        self.seen.setdefault(name, []).append(_copied(value))


def _copied(value: Any) -> Any:
    """A value with its own memory: tensors, what has the parts of a Quantized, lists and mappings of them."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return [_copied(part) for part in value]
    if isinstance(value, Mapping):
        return {name: _copied(part) for name, part in value.items()}
    if hasattr(value, "codes"):
        parts = {part: _copied(getattr(value, part, None)) for part in QUANTIZED_PARTS}
        return parts | {"swizzled": getattr(value, "swizzled", False)}
    return value


def tensors_of(step: Step) -> Tensors:
    """Everything that a step reported or gave, by name."""
    found: Tensors = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, list):
            for number, part in enumerate(value):
                add(f"{name} {number}", part)
        elif isinstance(value, dict):
            for part, inner in value.items():
                add(f"{name}.{part}", inner)

    for name, values in step.seen.items():
        for number, value in enumerate(values):
            add(f"step {step.number + 1} {name}" + (f" again {number}" if number else ""), value)
    return found


def run(plan: Plan, given: Tensors, backend: Caller) -> list[Step]:
    """Make the module, give it the parameters, and run its steps. Raises Unsupported and BackendError.

    `given`: x and dy with a dimension for the steps in front, and the parameters by name.
    """
    x, dy = given["x"], given["dy"]
    running = _Running(plan, backend, given, x.device)
    return [running.step(number, x[number], dy[number]) for number in range(plan.steps)]


def make(plan: Plan, backend: Caller, device: torch.device) -> Any:
    """The backend's module, as it makes it; an option is given where it is not the default."""
    layer = plan.layers[0]
    sizes: tuple[int, ...] = (layer.inner, layer.outer)
    options: dict[str, Any] = {}
    if plan.kind == "GroupedLinear":
        sizes = (layer.groups, *sizes)
    if plan.kind == "TransformerLayer":
        sizes = (layer.inner, plan.layers[2].outer, plan.heads)
    if layer.norm == "rms":
        options["norm"] = "rms"
    if not plan.bias:
        options["bias"] = False
    if plan.dtype != torch.bfloat16:
        options["dtype"] = plan.dtype
    if device.type != "cpu":
        options["device"] = device
    if plan.seed:
        options["seed"] = plan.seed
    for name in ("accumulate", "quantized_parameters", "delay_wgrad"):
        if getattr(plan, name):
            options[name] = True
    return backend.call(plan.kind, *sizes, **options)


class _Running:
    """A module, between its steps."""

    def __init__(self, plan: Plan, backend: Caller, given: Tensors, device: torch.device) -> None:
        self.plan, self.backend = plan, backend
        self.module = make(plan, backend, device)
        self.masters: dict[str, torch.Tensor] = {}
        """The weights in high precision, where the module keeps them quantized alone."""
        shapes = {name: shape for layer in plan.layers for name, shape in layer.shapes(bias=plan.bias).items()}
        parameters = dict(self.module.named_parameters())
        for name, shape in shapes.items():
            value = given[name]
            if plan.quantized_parameters and name in plan.weights:
                self.masters[name] = value.detach().clone()
                continue
            parameter = parameters.get(name)
            if parameter is None:
                raise BackendError(f"{plan.kind} has no parameter {name}; it has {', '.join(parameters) or 'none'}")
            if tuple(parameter.shape) != shape or parameter.dtype != plan.dtype:
                raise BackendError(
                    f"{plan.kind} has {name} of {dtype_name(parameter.dtype)} and shape {tuple(parameter.shape)}, not "
                    f"{dtype_name(plan.dtype)} and {shape}"
                )
            with torch.no_grad():
                parameter.copy_(value)
        self.parameters = {name: parameters[name] for name in shapes if name not in self.masters}
        self._write()
        for name in plan.weights if plan.accumulate else ():
            self._set_main_grad(name, given[f"{name}.main_grad"].detach().clone())

    def step(self, number: int, x: torch.Tensor, dy: torch.Tensor) -> Step:
        """Run a step, and where another may follow, move the parameters by their gradients."""
        plan, module = self.plan, self.module
        leaf = x.detach().requires_grad_()
        now = {**self.parameters, **self.masters}
        step = Step(number, x, dy, {name: tensor.detach().clone() for name, tensor in now.items()})
        if plan.accumulate:
            step.before = {name: self._main_grad(name).clone() for name in plan.weights}
        module.observer = step.report
        y = self.backend.run(f"forward of {plan.kind}", self._forward, leaf)
        self._check("y", y, (*x.shape[:-1], dy.shape[-1]))
        self.backend.run(f"backward of {plan.kind}", y.backward, dy)
        if plan.delay_wgrad:
            step.early = {name: _copied(self._gradient(name)) for name in plan.weights}
            self.backend.run(f"backward_dw of {plan.kind}", module.backward_dw)
        module.observer = None
        self._keep(step, y, leaf)
        if number + 1 < plan.steps:
            self._move()
        return step

    def _forward(self, x: torch.Tensor) -> Any:
        sizes = [list(self.plan.sections)] if self.plan.kind == "GroupedLinear" else []
        with autocast(self.plan.training):
            if self.plan.recompute:
                return checkpoint(lambda given: self.module(given, *sizes), x)
            return self.module(x, *sizes)

    def _keep(self, step: Step, y: torch.Tensor, leaf: torch.Tensor) -> None:
        """Take what the module gave for what is right or wrong, whatever it reported of it."""
        results: dict[str, Any] = {"y": y, "dx": leaf.grad}
        self._check("the gradient of x", leaf.grad, tuple(leaf.shape))
        for layer in self.plan.layers:
            groups = {"dw": layer.weights, "dbias": layer.biases if self.plan.bias else []}
            for name, members in groups.items():
                found = [self._gradient(member, wanted=True) for member in members]
                if found:
                    results[layer.prefix + name] = found if layer.groups else found[0]
            for name, member in (("dgamma", layer.gamma), ("dbeta", layer.beta)):
                if member:
                    results[layer.prefix + name] = self._gradient(member, wanted=True)
        for name, value in results.items():
            step.seen[name] = [*step.seen.get(name, [])[:-1], _copied(value)]

    def _move(self) -> None:
        """A plain SGD step from the module's own gradients; main gradients stay, and accumulate further."""
        with torch.no_grad():
            for name, parameter in {**self.parameters, **self.masters}.items():
                gradient = self._gradient(name)
                if gradient is not None:
                    parameter.copy_(parameter.float() - LEARNING_RATE * gradient.float())
                if name in self.parameters:
                    self.parameters[name].grad = None
        self._write()

    # ---- gradients -------------------------------------------------------------------------------------------------

    def _gradient(self, name: str, *, wanted: bool = False) -> torch.Tensor | None:
        """The gradient of a parameter: the main one of a weight that accumulates; None where there is none."""
        main = self.plan.accumulate and name in self.plan.weights
        found = self._main_grad(name) if main else self.parameters[name].grad
        if wanted and found is not None:
            shape = self.masters[name].shape if name in self.masters else self.parameters[name].shape
            self._check(f"the gradient of {name}", found, tuple(shape), torch.float32 if main else self.plan.dtype)
        if main and wanted and name in self.parameters and self.parameters[name].grad is not None:
            raise BackendError(f"{self.plan.kind} gave {name}.grad, though it accumulates into main_grad")
        return found

    def _holder(self, name: str) -> tuple[Any, str]:
        """Who has the main gradient of a weight, and its name there: the weight, or the module where there is none."""
        if name in self.parameters:
            return self.parameters[name], "main_grad"
        owner = self.module
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, last.replace("weight", "main_grad")

    def _main_grad(self, name: str) -> torch.Tensor:
        owner, attribute = self._holder(name)
        found = getattr(owner, attribute, None)
        if not isinstance(found, torch.Tensor):
            raise BackendError(f"{self.plan.kind} has no main gradient of {name}, but {type(found).__name__}")
        return found

    def _set_main_grad(self, name: str, start: torch.Tensor) -> None:
        owner, attribute = self._holder(name)
        setattr(owner, attribute, start)

    def _write(self) -> None:
        """Give the module its quantized weights."""
        if not self.masters:
            return
        plan = self.plan
        for layer in plan.layers:
            owner = getattr(self.module, layer.prefix.rstrip(".")) if layer.prefix else self.module
            masters = [self.masters[name] for name in layer.weights]
            given = masters if layer.groups else masters[0]
            self.backend.run(f"write_weight of {plan.kind}", owner.write_weight, given, plan.training)

    def _check(self, what: str, found: Any, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        """Raises BackendError where a result is no tensor of this shape and dtype."""
        wanted = dtype or self.plan.dtype
        if not isinstance(found, torch.Tensor):
            raise BackendError(f"{self.plan.kind} gave {what} as {type(found).__name__}, not a tensor")
        if tuple(found.shape) != shape or found.dtype != wanted:
            raise BackendError(
                f"{self.plan.kind} gave {what} as {dtype_name(found.dtype)} of shape {tuple(found.shape)}, not "
                f"{dtype_name(wanted)} of shape {shape}"
            )
