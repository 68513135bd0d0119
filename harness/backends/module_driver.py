"""Running a module: its steps of forward and backward, and all its reports of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from narrowgauge.harness.backends.results import QUANTIZED_PARTS, BackendError, dtype_name
from narrowgauge.harness.backends.transfer import to_device
from narrowgauge.harness.cases.layers import Layer
from narrowgauge.spec.modules.autocast import autocast, checkpoint
from narrowgauge.spec.modules.training import TrainingRecipe

Tensors = dict[str, torch.Tensor]


class Caller(Protocol):
    """Calls functions of a backend. Raises Unsupported, or BackendError with the function's message."""

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Result of a method of the backend."""

    def run(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Result of a function of the backend's module; `name` is for messages."""


LEARNING_RATE = 2.0**-8
"""Learning rate of the plain SGD between steps: a power of two adds no rounding to a gradient."""
ROUTING = ("expert_ids", "probabilities")
"""Arguments of a MoELayer beside x, per step."""
HALVES = ("x", "x columnwise", "w", "w columnwise", "dy", "dy columnwise")
"""Names of the quantized reports of a layer."""


@dataclass(frozen=True)
class Plan:
    """The program of a module: its layers, recipe, steps and use."""

    kind: str
    """Name of the class: `Linear`, `LayerNormLinear`, `GroupedLinear`, `MoELayer` or `TransformerLayer`."""
    training: TrainingRecipe
    layers: list[Layer]
    dtype: torch.dtype
    bias: bool
    seed: int = 0
    """Seed of the module's stochastic rounding."""
    steps: int = 1
    sections: tuple[int, ...] = ()
    heads: int = 1
    eps: float = 1e-5
    accumulate: bool = False
    quantized_parameters: bool = False
    delay_wgrad: bool = False
    recompute: bool = False
    use: str = "plain"
    """How the training uses the module.

    plain: forward and backward with an observer, and all gradients. unobserved: without an observer.
    no-grad, rewritten: before the forward of every step a probe, a forward without backward: under `torch.no_grad()`,
    or with weights that are changed in place before the probe and changed back in place after it. frozen-weight: the
    weights need no gradient. frozen-input: x needs no gradient. reloaded: between two steps a new module continues with
    the state dict of the old module. pending, pending-reversed: two forwards, then their backwards in the same or in
    the reversed order. microbatches: as pending, with both forwards in the same autocast.
    """

    @property
    def weights(self) -> list[str]:
        """Names of all quantized weights."""
        return [name for layer in self.layers for name in layer.weights]

    @property
    def probed(self) -> bool:
        """Whether a probe runs before every step."""
        return self.use in ("no-grad", "rewritten")

    @property
    def pending(self) -> bool:
        """Whether two forwards run before their backwards."""
        return self.use.startswith("pending") or self.use == "microbatches"

    @property
    def groups(self) -> list[list[int]]:
        """Groups of steps: all forwards of a group run before its first backward. Numbers in the order of the
        forwards."""
        size = 2 if self.pending else 1
        return [list(range(first, min(first + size, self.steps))) for first in range(0, self.steps, size)]

    def backwards(self, group: list[int]) -> list[int]:
        """Numbers of the steps of a group in the order of their backwards."""
        return group[::-1] if self.use == "pending-reversed" else group

    @property
    def gradients(self) -> Iterator[tuple[str, list[str], bool]]:
        """Gradients of parameters: name of the result, names of the parameters, and whether the result is a list."""
        for layer in self.layers:
            yield layer.prefix + "dw", layer.weights, bool(layer.groups)
            if self.bias:
                yield layer.prefix + "dbias", layer.biases, bool(layer.groups)
            for name, member in (("dgamma", layer.gamma), ("dbeta", layer.beta)):
                if member:
                    yield layer.prefix + name, [member], False


@dataclass
class Step:
    """A forward and backward: the inputs, and the reports and results of the module."""

    number: int
    """Number of the step, from 0: how often the module's backward ran before."""
    x: torch.Tensor
    dy: torch.Tensor
    parameters: dict[str, torch.Tensor]
    """The parameters during this step."""
    routing: Tensors = field(default_factory=dict)
    """`expert_ids` and `probabilities` of the tokens of a MoELayer."""
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    """The main gradients of the weights before the step, if the module accumulates."""
    seen: dict[str, list[Any]] = field(default_factory=dict)
    """All reports and results of the step, by name. A name has a list: a value per report, in the order of the reports.
    Names of results: `y`, `dx`, and the names of `Plan.gradients`; the result takes the place of its last report. A
    gradient added up over a group of steps keeps its report, and `sums` has the result."""
    early: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """Gradients of weights before `backward_dw`, if they have to wait for this call."""
    sums: dict[str, Any] = field(default_factory=dict)
    """Sums of the gradients of a group of pending steps, by name; only in the last step of the group."""
    probe: bool = False
    """Whether the step is a forward without a backward."""

    @property
    def title(self) -> str:
        """The step in names of stages and results."""
        return f"step {self.number + 1} probe" if self.probe else f"step {self.number + 1}"

    def last(self, name: str) -> Any:
        """The last report of a name, or None."""
        return self.seen[name][-1] if self.seen.get(name) else None

    def at(self, home: torch.device) -> Step:
        """The step on a device."""
        names = ("parameters", "routing", "before", "seen", "early", "sums")
        held = {name: to_device(getattr(self, name), home) for name in names}
        return Step(self.number, self.x.to(home), self.dy.to(home), **held, probe=self.probe)

    def report(self, name: str, value: Any) -> None:
        """The observer of the module: keep a copy of the value, because the module may change the value later."""
        self.seen.setdefault(name, []).append(_copied(value))


def _copied(value: Any) -> Any:
    """A value with its own memory: tensors, objects with the parts of a Quantized, lists and mappings of both."""
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
    """All reports and results of a step, by name."""
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
            add(f"{step.title} {name}" + (f" again {number}" if number else ""), value)
    for name, value in step.sums.items():
        add(f"{step.title} sum of {name}", value)
    return found


def run(plan: Plan, given: Tensors, backend: Caller) -> list[Step]:
    """Make the module, give it the parameters, and run its steps. Raises Unsupported and BackendError.

    `given`: x and dy with a dimension for the steps in front, and the parameters by name.
    """
    x, dy = given["x"], given["dy"]
    running = _Running(plan, backend, given, x.device)
    return [step for group in plan.groups for step in running.group(group, x, dy)]


def make(plan: Plan, backend: Caller, device: torch.device) -> Any:
    """The backend's module. Options are passed only if they differ from the default."""
    layer = plan.layers[0]
    sizes: tuple[int, ...] = (layer.inner, layer.outer)
    options: dict[str, Any] = {}
    if plan.kind == "GroupedLinear":
        sizes = (layer.groups, *sizes)
    if plan.kind == "MoELayer":
        sizes = (layer.groups, layer.inner, plan.layers[1].inner)
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


@dataclass
class _Pending:
    """A forward before its backward."""

    step: Step
    leaf: torch.Tensor
    y: Any
    probabilities: torch.Tensor | None


class _Running:
    """A module, between its steps."""

    def __init__(self, plan: Plan, backend: Caller, given: Tensors, device: torch.device) -> None:
        self.plan, self.backend, self.device = plan, backend, device
        self.routing = {name: given[name] for name in ROUTING if plan.kind == "MoELayer"}
        self.masters: dict[str, torch.Tensor] = {}
        """The weights in high precision, if the module keeps only quantized weights."""
        self.module = make(plan, backend, device)
        self.parameters = self._parameters()
        for name in self._shapes:
            if plan.quantized_parameters and name in plan.weights:
                self.masters[name] = given[name].detach().clone()
            else:
                with torch.no_grad():
                    self.parameters[name].copy_(given[name])
        if plan.use == "frozen-weight":
            for name in plan.weights:
                self.parameters[name].requires_grad_(False)
        self._write()
        for name in plan.weights if plan.accumulate else ():
            self._set_main_grad(name, given[f"{name}.main_grad"].detach().clone())

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        plan = self.plan
        return {name: shape for layer in plan.layers for name, shape in layer.shapes(bias=plan.bias).items()}

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters of the module in high precision. Raises BackendError for a missing or wrong parameter."""
        plan, found = self.plan, {}
        parameters = dict(self.module.named_parameters())
        for name, shape in self._shapes.items():
            if plan.quantized_parameters and name in plan.weights:
                continue
            parameter = parameters.get(name)
            if parameter is None:
                raise BackendError(f"{plan.kind} has no parameter {name}; it has {', '.join(parameters) or 'none'}")
            if tuple(parameter.shape) != shape or parameter.dtype != plan.dtype:
                raise BackendError(
                    f"{plan.kind} has {name} of {dtype_name(parameter.dtype)} and shape {tuple(parameter.shape)}, not "
                    f"{dtype_name(plan.dtype)} and {shape}"
                )
            found[name] = parameter
        return found

    def group(self, numbers: list[int], x: torch.Tensor, dy: torch.Tensor) -> list[Step]:
        """Run the steps of a group; before a next group, move the parameters by their gradients."""
        plan, found = self.plan, []
        pending: dict[int, _Pending] = {}
        with autocast(plan.training) if plan.use == "microbatches" else nullcontext():
            for number in numbers:
                if plan.probed:
                    found.append(self._probe(number, x[number]))
                leaf = x[number].detach().requires_grad_(plan.use != "frozen-input")
                step = Step(number, x[number], dy[number], self._now())
                routing = self._routing(number)
                y = self._observed_forward(step, leaf, routing)
                self._check("y", y, (*leaf.shape[:-1], dy.shape[-1]))
                pending[number] = _Pending(step, leaf, y, routing[-1] if routing else None)
                found.append(step)
        order = [pending[number] for number in plan.backwards(numbers)]
        self._run_backwards(order)
        if plan.delay_wgrad:
            self._run_late(order)
        self._observe(None)
        if numbers[-1] + 1 < plan.steps:
            self._move()
            if plan.use == "reloaded":
                self._reload()
        return found

    def _now(self) -> Tensors:
        """Copies of the parameters."""
        return {name: tensor.detach().clone() for name, tensor in {**self.parameters, **self.masters}.items()}

    def _observe(self, observer: Callable[[str, Any], None] | None) -> None:
        if self.plan.use != "unobserved":
            self.module.observer = observer

    def _routing(self, number: int) -> list[torch.Tensor]:
        """Experts and probabilities of the tokens of a step of a MoELayer; probabilities need a gradient."""
        return [tensor[number].detach().requires_grad_(tensor.is_floating_point()) for tensor in self.routing.values()]

    def _observed_forward(self, step: Step, x: torch.Tensor, routing: list[torch.Tensor]) -> Any:
        self._observe(step.report)
        return self.backend.run(f"forward of {self.plan.kind}", self._forward, x, routing)

    def _probe(self, number: int, x: torch.Tensor) -> Step:
        """A forward without a backward."""
        rewrites = self.plan.use == "rewritten"
        if rewrites:
            self._negate()
        step = Step(number, x, x.new_empty(0), self._now(), probe=True)
        with torch.set_grad_enabled(rewrites):
            y = self._observed_forward(step, x.detach().requires_grad_(rewrites), self._routing(number))
        step.seen["y"] = [_copied(y)]
        if rewrites:
            self._negate()
        return step

    def _negate(self) -> None:
        """Negate, in place, the element of every weight with the largest magnitude. No amax changes."""
        with torch.no_grad():
            for name in self.plan.weights:
                weight = self.masters[name] if name in self.masters else self.parameters[name]
                elements = weight.view(-1)
                elements[elements.float().abs().nan_to_num_(nan=0.0).argmax()].neg_()
        self._write()

    def _run_backwards(self, order: list[_Pending]) -> None:
        """Run the backwards, and keep the results of every backward in its step."""
        adding: set[str] = set()
        for number, pending in enumerate(order):
            step = pending.step
            if self.plan.accumulate:
                step.before = {name: self._main_grad(name).clone() for name in self.plan.weights}
            if len(order) > 1:  # else the observer of the forward is still set
                self._observe(step.report)
            self.backend.run(f"backward of {self.plan.kind}", pending.y.backward, step.dy)
            self._keep(pending, adding, last=number == len(order) - 1)

    def _run_late(self, order: list[_Pending]) -> None:
        """`backward_dw`, and its gradients of weights: the oldest backward first."""
        plan, late, steps = self.plan, order[0].step, [pending.step for pending in order]
        late.early = {name: _copied(self._gradient(name)) for name in plan.weights}
        if len(steps) > 1:
            late = Step(0, late.x, late.dy, {})
            self._observe(late.report)
        self.backend.run(f"backward_dw of {plan.kind}", self.module.backward_dw)
        for result, members, listed in plan.gradients:
            if not result.endswith("dw"):
                continue
            total = _copied(self._result(members, listed))
            if len(steps) == 1:
                late.seen[result] = [*late.seen.get(result, [])[:-1], total]
                continue
            reported = late.seen.get(result, [])
            steps[-1].sums[result] = total
            if any(one is None for one in (total if listed else [total])):
                reported = [total] * len(steps)
            if len(reported) != len(steps):
                continue  # the gradient of each step is unknown
            for step, value in zip(steps, reported, strict=True):
                step.seen[result] = [value]
                self._check_reported(result, members, value, listed)
            if plan.accumulate:
                for before, step in zip(reported, steps[1:], strict=False):
                    step.before |= dict(zip(members, before if listed else [before], strict=True))

    def _forward(self, x: torch.Tensor, routing: list[torch.Tensor]) -> Any:
        further = [list(self.plan.sections)] if self.plan.kind == "GroupedLinear" else routing
        with autocast(self.plan.training):
            if self.plan.recompute:
                return checkpoint(lambda given: self.module(given, *further), x)
            return self.module(x, *further)

    def _keep(self, pending: _Pending, adding: set[str], *, last: bool) -> None:
        """Keep the results of a backward for the judgement, whatever the module reported.

        Gradients of a group of pending steps add up in `grad`. The gradient of a step is then the module's report.
        Without a report, `grad` is emptied between the backwards. `adding`: names of added results.
        """
        plan, step = self.plan, pending.step
        results: dict[str, Any] = {"y": pending.y}
        if plan.use != "frozen-input":
            results["dx"] = pending.leaf.grad
            self._check("the gradient of x", pending.leaf.grad, tuple(pending.leaf.shape))
        if (probabilities := pending.probabilities) is not None:
            found, shape = probabilities.grad, tuple(probabilities.shape)
            results["dprobabilities"] = found
            self._check("the gradient of the probabilities", found, shape, probabilities.dtype)
        for result, members, listed in plan.gradients:
            main = plan.accumulate and members[0] in plan.weights
            if plan.delay_wgrad and members[0] in plan.weights:
                continue
            found = self._result(members, listed)
            if result in adding:
                if step.seen.get(result):
                    self._check_reported(result, members, step.seen[result][-1], listed)
                if last:
                    step.sums[result] = _copied(found)
                continue
            results[result] = found
            if main or last:
                continue
            if step.seen.get(result):
                adding.add(result)
            else:
                results[result] = _copied(found)
                for member in members:
                    self.parameters[member].grad = None
        for name, value in results.items():
            step.seen[name] = [*step.seen.get(name, [])[:-1], _copied(value)]

    def _result(self, members: list[str], listed: bool) -> Any:
        """The present gradients of parameters: a list, or that of the only one."""
        found = [self._gradient(member, wanted=True) for member in members]
        return found if listed else found[0]

    def _check_reported(self, result: str, members: list[str], value: Any, listed: bool) -> None:
        """Raises BackendError if a reported gradient is no tensor like its parameter."""
        for member, one in zip(members, value if listed and isinstance(value, list) else [value], strict=False):
            if one is not None:
                main = self.plan.accumulate and member in self.plan.weights
                dtype = torch.float32 if main else self.plan.dtype
                self._check(f"{result} to the observer", one, self._shapes[member], dtype)

    def _move(self) -> None:
        """A plain SGD step from the module's own gradients; main gradients stay, and accumulate further."""
        with torch.no_grad():
            for name, parameter in {**self.parameters, **self.masters}.items():
                frozen = self.plan.use == "frozen-weight" and name in self.plan.weights
                gradient = None if frozen else self._gradient(name)
                if gradient is not None:
                    parameter.copy_(parameter.float() - LEARNING_RATE * gradient.float())
                if name in self.parameters:
                    self.parameters[name].grad = None
        self._write()

    def _reload(self) -> None:
        """Continue with a new module and the state dict of the old one. Main gradients belong to the optimizer."""
        plan = self.plan
        state = self.backend.run(f"state_dict of {plan.kind}", self.module.state_dict)
        for name, value in state.items():  # as in a file: no memory of the old module
            state[name] = value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        mains = {name: self._main_grad(name) for name in plan.weights if plan.accumulate}
        self.module = make(plan, self.backend, self.device)
        self.backend.run(f"load_state_dict of {plan.kind}", self.module.load_state_dict, state)
        self.parameters = self._parameters()
        for name, main in mains.items():
            self._set_main_grad(name, main)

    # ---- gradients -------------------------------------------------------------------------------------------------

    def _gradient(self, name: str, *, wanted: bool = False) -> torch.Tensor | None:
        """The gradient of a parameter: the main one of a weight that accumulates; None where there is none."""
        main = self.plan.accumulate and name in self.plan.weights
        found = self._main_grad(name) if main else self.parameters[name].grad
        if wanted and found is not None:
            shape = self._shapes[name]
            self._check(f"the gradient of {name}", found, shape, torch.float32 if main else self.plan.dtype)
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
