"""Modules: forward and backward of a layer under a training recipe, judged stage by stage.

The table in docs/numerics.md#modules is executed here once more, by the doors of the reference and not by its modules:
what those do is judged as anybody else's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.guarded_memory import element_bytes
from narrowgauge.harness.backends.module_driver import ROUTING, Plan, Step, tensors_of
from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.stage import StageResult, merge_stages
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.machine.timing import count_seconds
from narrowgauge.harness.operations.gemm.product import order_of
from narrowgauge.harness.operations.modules.accuracy import accuracy
from narrowgauge.harness.operations.modules.case import ModuleCase
from narrowgauge.harness.operations.modules.delayed import States, initial_states
from narrowgauge.harness.operations.modules.experts import ExpertStages
from narrowgauge.harness.operations.modules.ground import Ground
from narrowgauge.harness.operations.modules.linear import LinearStages
from narrowgauge.harness.operations.modules.norm import NormStages
from narrowgauge.harness.operations.modules.transformer import TransformerStages
from narrowgauge.harness.operations.quantize.judge import rotates_freely
from narrowgauge.harness.operations.stages.black_box import makes_own_bits
from narrowgauge.harness.operations.stages.high_precision import bounded_stage
from narrowgauge.harness.operations.stages.oracle import dequantize, residual_sum
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.reference import modules as reference_modules
from narrowgauge.reference.high_precision.bounded import exactly
from narrowgauge.spec.dtypes import TORCH_DTYPES

TWICE = ("history", "scale")
"""States changed at the end of the forward, and again at the end of the backward."""

RESULTS = ("y", "dx", "dw", "dbias", "dgamma", "dbeta", "dprobabilities")
"""Results of a module, independent of its reports."""


def judge_module(case: ModuleCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run a module's steps, and judge each stage given the module's own result of the one before.

    What the module does not report is the reference's own, or, where right modules may differ in it, what follows is
    not compared: the stages of the outcome say what was. Raises Unsupported if that leaves nothing to compare.
    """
    plan = plan_of(case, inputs)
    own = makes_own_bits(backend, plan.training.grad)
    kept: list[Step] = []

    def call(given: Tensors) -> Tensors:
        if own:
            backend.host.seed(inputs.random("dy"))
        steps = _arranged(plan, backend.run_module(plan, given), inputs)
        kept.extend([step.at(inputs.x.device) for step in steps] if not kept else [])
        if own:  # another run may draw others, and all that follows from them differs
            return tensors_of(replace(steps[0], seen={n: v for n, v in steps[0].seen.items() if _settled(n)}))
        found: Tensors = {}
        for step in steps:
            found |= tensors_of(step)
        return found

    outputs, protection, seconds = repeated(backend, inputs.x.device, given_of(inputs), call, composed=True)
    outcome, protections = Outcome(protection, outputs, seconds=seconds), len(protection)
    # The backend's own copies lie between guard zones, and the backend may have written to them.
    _arranged(plan, kept, inputs)
    twin = plain_run(plan, backend, inputs) if plan.use in ("unobserved", "reloaded") and not own else []
    same = _same_as_plain(plan.use, kept, twin)
    judge = Judge(plan, backend, outcome)
    # The plain use of equal bytes has reports. Different bytes may be right too, and are judged without reports.
    judge.run(twin if twin and plan.use == "unobserved" and same.passed else kept)
    judge.note_unseen()
    if twin and (plan.use == "reloaded" or same.passed):
        outcome.stages.append(same)
    if plan.use != "plain" and not own:
        _note_use(plan, outcome, twin, backend, inputs)
    right = all(stage.passed for stage in outcome.stages)
    if judge.unseen and right and inputs.x.numel() and not any(s.compared for s in outcome.stages[protections:]):
        raise Unsupported(
            f"the module reports no {', '.join(judge.unseen)} to its observer, and all its results follow from these"
        )
    _pool_figures(outcome.stages)
    outcome.accuracy = accuracy(plan, kept[-1])
    if not right:  # figures of the error alone: a run of the reference module takes a fifth of the judge's time
        with count_seconds("reference"):
            own_run = Backend.local("reference", reference_modules).run_module(plan, given_of(inputs))
        actual, expected = _ends(plan, kept), _ends(plan, own_run)
        if actual.numel() == expected.numel():  # no gradient is missing
            outcome.actual, outcome.expected = actual, expected
    return outcome


def _arranged(plan: Plan, steps: list[Step], inputs: Inputs) -> list[Step]:
    """The steps with their number, x and dy by the plan. Raises BackendError for a wrong number of steps."""
    order = [(number, probe) for group in plan.groups for number in group for probe in (True, False)[not plan.probed :]]
    if len(steps) != len(order):
        raise BackendError(f"{plan.kind} gave {len(steps)} steps; the case has {len(order)}")
    for step, (number, probe) in zip(steps, order, strict=True):
        step.number, step.probe, step.x = number, probe, inputs.x[number]
        step.routing = {name: tensor[number] for name in ROUTING if (tensor := inputs.get(f"given.{name}")) is not None}
        step.dy = inputs["given.dy"][number][:0] if probe else inputs["given.dy"][number]
    return steps


def plain_run(plan: Plan, backend: Backend, inputs: Inputs) -> list[Step]:
    """The steps of the same training in the plain use. Raises as `Backend.run_module` does."""
    plain = replace(plan, use="plain")
    steps = _arranged(plain, backend.run_module(plain, given_of(inputs)), inputs)
    return [step.at(inputs.x.device) for step in steps]


def _same_as_plain(use: str, steps: list[Step], twin: list[Step]) -> StageResult:
    """Compare outputs and gradients with the plain use, byte for byte."""
    same = StageResult(use, "repeat", 0)
    for step, other in zip(steps, twin, strict=False):
        for name in (name for name in step.seen if name.rpartition(".")[2] in RESULTS):
            one, expected = (
                tensors_of(Step(0, step.x, step.dy, {}, seen={name: [value]}))
                for value in (step.last(name), other.last(name))
            )
            for part in one.keys() | expected.keys():
                found, right = one.get(part), expected.get(part)
                size = max(0 if tensor is None else tensor.numel() for tensor in (found, right))
                same.compared += size
                if found is None or right is None or not _same_bytes(found, right):
                    same.mismatches += size
                    same.sentence = same.sentence or f"{name} of {step.title} has other bytes than in the plain use"
    return same


def _note_use(plan: Plan, outcome: Outcome, twin: list[Step], backend: Backend, inputs: Inputs) -> None:
    """Add the cause of a wrong use to the first wrong stage, if the same training is right in the plain use."""
    wrong = next((stage for stage in outcome.stages if not stage.passed), None)
    if wrong is None or wrong.stage in ("memory", "repeat"):
        return
    plain = Outcome()
    try:
        Judge(replace(plan, use="plain"), backend, plain).run(twin or plain_run(plan, backend, inputs))
    except (BackendError, Unsupported):
        return
    if all(stage.passed for stage in plain.stages):
        wrong.causes.append(f"use:{plan.use}")


def given_of(inputs: Inputs) -> Tensors:
    """Arguments of a module by name: x and the parameters."""
    return {"x": inputs.x, **inputs.under("given.")}


def plan_of(case: ModuleCase, inputs: Inputs) -> Plan:
    """The plan of a case: the module, its options and its steps."""
    bits = inputs.counters.get("dy")
    return Plan(
        case.module,
        case.training_recipe,
        case.layers,
        TORCH_DTYPES[case.dtype],
        bias=case.bias,
        seed=0 if bits is None else bits[0],
        steps=case.steps,
        sections=case.section_sizes,
        heads=case.attention_heads,
        accumulate=case.accumulate,
        quantized_parameters=case.quantized_parameters,
        delay_wgrad=case.delayed_wgrad,
        recompute=case.recompute,
        use=case.use,
    )


class Judge:
    """Judges the steps of a module in order: delayed scaling depends on the steps before."""

    def __init__(self, plan: Plan, backend: Backend, outcome: Outcome) -> None:
        self.plan, self.backend, self.outcome = plan, backend, outcome
        self.order, self.free = partial(order_of, backend), rotates_freely(backend)
        self.own = makes_own_bits(backend, plan.training.grad)
        self.unseen: dict[str, None] = {}
        """Names without a report in a step, therefore not compared."""
        self.states: States = {}
        self._passes = 0
        self._before: Step | None = None

    def run(self, steps: list[Step]) -> None:
        """Judge the steps of the plan in the order of the run, and add their stages to the outcome."""
        self.states = initial_states(self.plan.training, self.plan.layers, steps[0].x.device)
        probes = {step.number: step for step in steps if step.probe}
        by_number = {step.number: step for step in steps if not step.probe}
        for numbers in self.plan.groups:
            group = [by_number[number] for number in numbers]
            if self.plan.probed:
                self._probe(probes[numbers[0]])
            before = {prefix: replace(state) for prefix, state in self.states.items()}
            outcome, unseen = self._judged(group)
            late = self.plan.delay_wgrad and len(group) > 1
            if late and any(stage.stage.endswith("dw") and not stage.passed for stage in outcome.stages):
                # A right `backward_dw` may compute the newest gradient first.
                after, self.states = self.states, before
                _swap_late(self.plan, group)
                other, unseen_then = self._judged(group)
                if all(stage.passed for stage in other.stages):
                    outcome, unseen = other, unseen_then
                else:
                    self.states = after
            self._passes += len(group)
            self.unseen |= unseen
            self._add(outcome)
            self._before = group[-1]

    def note_unseen(self) -> None:
        """Add an empty stage for every result without a report."""
        self.outcome.stages += [StageResult(name, "exact", 0) for name in self.unseen]

    def _add(self, outcome: Outcome) -> None:
        whole = self.outcome
        if all(stage.passed for stage in whole.stages):
            whole.causes = outcome.causes
        whole.formula = whole.formula or outcome.formula
        whole.stages += outcome.stages
        whole.products += outcome.products
        whole.judged += outcome.judged

    def _stages(self, ground: Ground) -> LinearStages | NormStages | TransformerStages | ExpertStages:
        if self.plan.kind == "TransformerLayer":
            return TransformerStages(ground, self.states)
        if self.plan.kind == "MoELayer":
            return ExpertStages(ground, self.states)
        (layer,) = self.plan.layers
        return (NormStages if layer.norm else LinearStages)(ground, layer, self.states)

    def _ground(self, step: Step, outcome: Outcome, unseen: dict[str, None], others: dict[str, Step]) -> Ground:
        return Ground(self.plan, step, outcome, self.order, self.free, self.own, unseen, others)

    def _probe(self, step: Step) -> None:
        """Judge a forward without a backward."""
        outcome, unseen = Outcome(), self.unseen
        others = {} if self._before is None else {"operand-of-the-step-before": self._before}
        stages = self._stages(self._ground(step, outcome, unseen, others))
        stages.forward(step.x.flatten(0, -2))
        stages.end_forward()
        self._add(outcome)
        self._before = step

    def _judged(self, group: list[Step]) -> tuple[Outcome, dict[str, None]]:
        """The outcome of steps with all forwards before the backwards, and the missing reports."""
        outcome, unseen = Outcome(), dict[str, None]()
        begun = {}
        for step in group:
            others = {}
            if len(group) > 1:
                others["operand-of-another-pass"] = group[1] if step is group[0] else group[0]
            if self._before is not None:
                cause = "operand-of-the-forward-before" if self._before.probe else "operand-of-the-step-before"
                others[cause] = self._before
            ground = self._ground(step, outcome, unseen, others)
            if self.plan.recompute:
                outcome.stages.append(_recomputed(ground))
            begun[step.number] = ground, self._stages(ground)
            begun[step.number][1].forward(step.x.flatten(0, -2))
            begun[step.number][1].end_forward(recorded=self.plan.use == "microbatches" and step is not group[-1])
        if self.plan.use == "microbatches":
            for step in group[:-1]:
                begun[step.number][1].share_forward(begun[group[-1].number][1])
        order = self.plan.backwards([step.number for step in group])
        for passes, number in enumerate(order, self._passes):
            ground, stages = begun[number]
            ground.passes = passes
            stages.backward(ground.step.dy.flatten(0, -2))
            stages.end()
        if len(group) > 1:
            outcome.stages += _sums(self.plan, [begun[number][0] for number in order])
        return outcome, unseen


def _swap_late(plan: Plan, group: list[Step]) -> None:
    """Exchange the gradients of weights of two steps, with the main gradients before them."""
    one, other = group
    for name in [f"{layer.prefix}dw" for layer in plan.layers]:
        if name in one.seen and name in other.seen:
            one.seen[name], other.seen[name] = other.seen[name], one.seen[name]
    one.before, other.before = other.before, one.before
    one.early, other.early = other.early, one.early


def _sums(plan: Plan, grounds: list[Ground]) -> list[StageResult]:
    """Stages of the gradients of parameters after all backwards of pending steps, in the order of the backwards."""
    stages = []
    steps = [ground.step for ground in grounds]
    for name, members, listed in plan.gradients:
        total, main = steps[-1].sums.get(name), plan.accumulate and members[0] in plan.weights
        parts = [step.last(name) for step in steps]
        result = []
        if total is not None and all(name in ground.unknown for ground in grounds):
            for number, member in enumerate(members):
                result.append([_sum_of_products(grounds, name, number, member, total[number] if listed else total)])
        elif total is None or any(part is None for part in parts):
            continue
        for number, member in enumerate(members if not result else ()):
            found, *given = (part[number] if listed else part for part in (total, *parts))
            stage = f"{steps[-1].title} sum of {name}"
            if any(one is None for one in (found, *given)):
                continue
            if main:
                # A main gradient holds the sum after the later of the two.
                later = equal_bits(steps[1].before[member], given[0])
                expected, dtype = exactly(given[later]), torch.float32
            else:
                expected, dtype = residual_sum(*given), plan.dtype
            result.append([bounded_stage(stage, found, expected, dtype, figures=False)])
            if not result[-1][0].passed and equal_bits(found, given[-1]) and not main:
                result[-1][0].causes.append("gradient-overwritten")
        stages += merge_stages(result, "section") if len(result) > 1 else result[0] if result else []
    return stages


def _sum_of_products(grounds: list[Ground], name: str, number: int, member: str, found: torch.Tensor) -> StageResult:
    """Judge Σ aᵢ·bᵢᵀ (+ c) of pending steps with unknown terms: a single product, or a sum of several.

    A has the sums of all magnitudes. A kernel adds n numbers of float32 in any order, truncated sums too: the error is
    at most n·2^-23·A/(1 − n·2^-23), with 16 more roundings for the scales of both sides. Then at most three results are
    rounded to the dtype, each within 2^-(p−1) of its magnitude, at most A. Subnormal numbers can be 0, with an error
    below 2^-126, or 2^-14 of float16.
    """
    stage = StageResult(f"{grounds[-1].step.title} sum of {name}", "bound", found.numel())
    centre = torch.zeros_like(found, dtype=torch.float64)
    magnitude, count = torch.zeros_like(centre), 1
    if (c := grounds[0].step.before.get(member)) is not None:
        centre, magnitude = centre + c, magnitude + c.abs()
    for ground in grounds:
        left, right = (operands[number] for operands in ground.unknown[name])
        order = ground.order(left, right)
        if any((order.aligned, order.fraction, order.operands)):  # larger errors
            return StageResult(stage.stage, "bound", 0)
        a, b = dequantize(left).double(), dequantize(right).double()
        centre, magnitude, count = centre + a @ b.T, magnitude + a.abs() @ b.abs().T, count + a.shape[1] + 16
    numbers, sum_error = torch.finfo(found.dtype), count * 2.0**-23
    error = magnitude * (sum_error / (1 - sum_error) + 4 * numbers.eps) + count * numbers.smallest_normal
    known = magnitude < numbers.max / 2  # no sum overflows; false for NaN
    wrong = known & ~((found.double() - centre).abs() <= error)
    stage.mismatches = int(wrong.sum())
    if stage.mismatches:
        stage.sentence = f"{stage.mismatches} of {found.numel()} elements are not the sum of all pending gradients"
        one = [dequantize(ground.unknown[name][0][number]).double() for ground in grounds]
        other = [dequantize(ground.unknown[name][1][number]).double() for ground in grounds]
        alone = one[-1] @ other[-1].T
        if bool((~known | ((found.double() - alone).abs() <= error)).all()) and c is None:
            stage.causes.append("gradient-overwritten")
    return stage


def _recomputed(ground: Ground) -> StageResult:
    """Two reports of a forward under the same name must have the same bytes."""
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
    return torch.equal(*(element_bytes(t) for t in (one, other)))


def _settled(name: str) -> bool:
    """Whether a result of the first step does not follow from a backward, whose random bits may be the module's own."""
    last = name.rpartition(".")[2]
    return not last.startswith("d") and last not in TWICE


def _ends(plan: Plan, steps: list[Step]) -> torch.Tensor:
    """Outputs and gradients of all steps, in sequence."""
    parts = []
    for step in steps:
        for name in ("y", "dx", *(f"{layer.prefix}dw" for layer in plan.layers)):
            value = step.last(name)
            parts += [t.flatten().float() for t in (value if isinstance(value, list) else [value]) if t is not None]
    return torch.cat(parts)


def _pool_figures(stages: list[StageResult]) -> None:
    """Join the figures of several products: shares over all outputs, the largest budget and interval."""
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
