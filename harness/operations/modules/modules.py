"""Modules: forward and backward of a layer under a training recipe, judged stage by stage.

The table in docs/numerics.md#modules is executed here once more, by the doors of the reference and not by its modules:
what those do is judged as anybody else's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.module_driver import Plan, Step, tensors_of
from narrowgauge.harness.cases.modules import ModuleCase, TransformerLayerCase
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import ModuleInputs
from narrowgauge.harness.machine.timing import count_seconds
from narrowgauge.harness.operations.modules.accuracy import accuracy
from narrowgauge.harness.operations.modules.linear import Ground, LinearStages, State
from narrowgauge.harness.operations.modules.norm import NormStages
from narrowgauge.harness.operations.modules.transformer import TransformerStages
from narrowgauge.harness.operations.quantize import rotates_freely
from narrowgauge.harness.operations.stages.black_box import makes_own_bits
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.product import order_of
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.reference import modules as reference_modules
from narrowgauge.spec.dtypes import TORCH_DTYPES

TWICE = ("history", "scale")
"""What moves at the end of the forward and again at that of the backward."""


def judge_module(case: ModuleCase, inputs: ModuleInputs, backend: Backend) -> Outcome:
    """Run a module's steps, and judge each stage given the module's own result of the one before.

    What the module does not report is the reference's own, or, where right modules may differ in it, what follows is
    not compared: the stages of the outcome say what was.
    """
    plan = plan_of(case, inputs)
    own = makes_own_bits(backend, plan.training.grad)
    kept: list[Step] = []

    def call(given: Tensors) -> Tensors:
        if own:
            backend.host.seed(inputs.random.get("dy"))
        steps = backend.run_module(plan, given)
        kept.extend([step.at(inputs.x.device) for step in steps] if not kept else [])
        if own:  # another run may draw others, and all that follows from them differs
            return tensors_of(replace(steps[0], seen={n: v for n, v in steps[0].seen.items() if _settled(n)}))
        found: Tensors = {}
        for step in steps:
            found |= tensors_of(step)
        return found

    outputs, protection, seconds = repeated(backend, inputs.x.device, given_of(inputs), call)
    outcome = Outcome(protection, outputs, seconds=seconds)
    for step, x, dy in zip(kept, inputs.x, inputs.dy, strict=True):
        # The backend's own copies lie between guard zones, and the backend may have written to them.
        step.x, step.dy = x, dy
    judge = Judge(plan, backend, outcome)
    for step in kept:
        judge.step(step)
    judge.note_unseen()
    _pool_figures(outcome.stages)
    outcome.accuracy = accuracy(plan, kept[-1])
    with count_seconds("reference"):
        own_run = Backend.local("reference", reference_modules).run_module(plan, given_of(inputs))
    actual, expected = _ends(plan, kept), _ends(plan, own_run)
    if actual.numel() == expected.numel():  # no gradient is missing
        outcome.actual, outcome.expected = actual, expected
    return outcome


def given_of(inputs: ModuleInputs) -> Tensors:
    """Arguments of a module by name: x and the parameters."""
    return {"x": inputs.x, **inputs.given}


def plan_of(case: ModuleCase, inputs: ModuleInputs) -> Plan:
    """The plan of a case: the module, its options and its steps."""
    bits = inputs.philox("dy")
    return Plan(
        case.module,
        case.training_recipe,
        case.layers,
        TORCH_DTYPES[case.dtype],
        bias=case.bias,
        seed=0 if bits is None else bits[0],
        steps=case.steps,
        sections=case.section_sizes,
        heads=case.heads if isinstance(case, TransformerLayerCase) else 1,
        accumulate=case.accumulate,
        quantized_parameters=case.quantized_parameters,
        delay_wgrad=case.delayed_wgrad,
        recompute=case.recompute,
    )


class Judge:
    """Judges the steps of one module, one after the other: what delayed scaling does depends on those before."""

    def __init__(self, plan: Plan, backend: Backend, outcome: Outcome) -> None:
        self.plan, self.outcome = plan, outcome
        self.order, self.free = partial(order_of, backend), rotates_freely(backend)
        self.own = makes_own_bits(backend, plan.training.grad)
        self.unseen: dict[str, None] = {}
        """What was not reported in some step, and so not compared."""
        self.states: dict[str, State | None] = {layer.prefix: None for layer in plan.layers}
        self._before: Step | None = None

    def step(self, step: Step) -> None:
        """Judge a step, and add its stages to the outcome."""
        plan = self.plan
        if plan.training.history and not step.number:
            for prefix in self.states:
                history = torch.zeros(plan.training.history, 3, device=step.x.device)
                self.states[prefix] = history, torch.ones(3, device=step.x.device)
        ground = Ground(plan, step, self.outcome, self.order, self.free, self.own, self.unseen, self._before)
        self._before = step
        x, dy = step.x.flatten(0, -2), step.dy.flatten(0, -2)
        if plan.recompute:
            self.outcome.stages.append(_recomputed(ground))
        if plan.kind == "TransformerLayer":
            layer = TransformerStages(ground, self.states)
            layer.forward(x)
            layer.backward(dy)
            self.states = layer.end()
        else:
            only = plan.layers[0]
            stages = (NormStages if only.norm else LinearStages)(ground, only, self.states[only.prefix])
            stages.forward(x)
            stages.backward(dy)
            self.states = {only.prefix: stages.end()}

    def note_unseen(self) -> None:
        """Add a stage for each result that was not reported: it compared nothing."""
        self.outcome.stages += [StageResult(name, "exact", 0) for name in self.unseen]


def _recomputed(ground: Ground) -> StageResult:
    """What a forward reported twice has to be the same bytes."""
    result = StageResult(ground.stage("recomputed"), "exact", 0)
    for name, values in ground.step.seen.items():
        if name.rpartition(".")[2] in TWICE or len(values) < 2:
            continue
        first, *others = (tensors_of(Step(0, ground.step.x, ground.step.dy, {}, seen={name: [v]})) for v in values)
        for other in others:
            for part, tensor in first.items():
                again = other.get(part)
                if tensor is None:
                    continue
                result.compared += tensor.numel()
                if again is None or not _same_bytes(tensor, again):
                    result.mismatches += 1
                    result.causes = ["recomputed-otherwise"]
                    result.sentence = result.sentence or f"{name} is not what it was in the first forward"
    return result


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same, whatever their dimensions: `y` is reported as a matrix."""
    if one.numel() != other.numel() or one.dtype != other.dtype:
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))


def _settled(name: str) -> bool:
    """Whether a result of the first step does not follow from a backward, whose random bits may be the module's own."""
    last = name.rpartition(".")[2]
    return not last.startswith("d") and last not in TWICE


def _ends(plan: Plan, steps: list[Step]) -> torch.Tensor:
    """Outputs and gradients of all steps, one behind the other."""
    parts = []
    for step in steps:
        for name in ("y", "dx", *(f"{layer.prefix}dw" for layer in plan.layers)):
            value = step.last(name)
            parts += [t.flatten().float() for t in (value if isinstance(value, list) else [value]) if t is not None]
    return torch.cat(parts)


def _pool_figures(stages: list[StageResult]) -> None:
    """Make the figures of several products those of one: shares over all outputs, the largest budget and interval."""
    products = [stage for stage in stages if stage.figures]
    if not products:
        return
    outputs = sum(stage.compared for stage in products)
    pooled = {}
    for name in ("exact_share", "ordered_share", "interval_ulps_mean"):
        given = [stage for stage in products if name in stage.figures]
        if given:
            counted = outputs if name != "interval_ulps_mean" else sum(stage.compared for stage in given)
            pooled[name] = sum(stage.figures[name] * stage.compared for stage in given) / counted
    for name in ("budget_max", "budget_p99", "interval_ulps_max"):
        found = [stage.figures[name] for stage in products if name in stage.figures]
        if found:
            pooled[name] = max(found)
    histograms = [stage.figures["budget_histogram"] for stage in products if "budget_histogram" in stage.figures]
    if histograms:
        pooled["budget_histogram"] = [sum(counts) for counts in zip(*histograms, strict=True)]
    for stage in products:
        stage.figures = {}
    products[-1].figures = pooled
