"""One linear layer, forward and backward: operands by role, three products, the bias, the amax history."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import BackendError
from narrowgauge.harness.backends.guarded_memory import dense
from narrowgauge.harness.backends.module_driver import Plan, Step
from narrowgauge.harness.backends.results import as_quantized
from narrowgauge.harness.cases.layers import Layer
from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.stage import StageResult, merge_stages
from narrowgauge.harness.operations.gemm.product import Operands
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.high_precision import bounded_stage
from narrowgauge.harness.operations.stages.oracle import bounds, column_sum
from narrowgauge.harness.operations.stages.outcome import CauseSearch, Formula, Outcome, Product
from narrowgauge.harness.operations.stages.output import output_stage
from narrowgauge.harness.operations.stages.quantized import Subject, quantize_stages
from narrowgauge.harness.operations.update_scale.deviations import wrong_histories, wrong_scales
from narrowgauge.harness.operations.update_scale.judge import history_stage, scale_stage
from narrowgauge.reference.bounds.bounds import Bounds
from narrowgauge.reference.high_precision.bounded import Bounded
from narrowgauge.spec.modules.training import TrainingRecipe
from narrowgauge.spec.quantized import Half, Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LINEAR, TILES
from narrowgauge.spec.summation import Summation

COLUMNS = {"x": 0, "w": 1, "dy": 2}
"""Columns of an amax history, and numbers among scales, of each role of an operand."""
GRAD = COLUMNS["dy"]


@dataclass(frozen=True)
class Operand:
    """An operand of the products of a layer: a half of the input x, of the weights w or of the gradient dy."""

    role: str
    half: Half

    @property
    def name(self) -> str:
        """Name of the operand for an observer."""
        return self.half.operand(self.role)


PRODUCTS = {
    "y": (Operand("x", Half.ROW), Operand("w", Half.ROW)),
    "dx": (Operand("dy", Half.ROW), Operand("w", Half.COLUMN)),
    "dw": (Operand("dy", Half.COLUMN), Operand("x", Half.COLUMN)),
}
"""Operands of each product of a layer."""

State = tuple[torch.Tensor, torch.Tensor]
"""Columns of an amax history, float32 (H, n), and their scales, float32 (n,)."""
Matrices = Sequence[torch.Tensor] | None
"""Of each section; None where nobody knows them."""


@dataclass
class Delayed:
    """State of delayed scaling of a layer; None if nobody knows it."""

    forward: State | None
    """Of input and weight: moved at the end of a forward."""
    grad: State | None
    """Of the gradient: moved at the end of a backward."""


States = dict[str, Delayed]
"""By the prefix of the layer."""


def initial_states(training: TrainingRecipe, layers: Sequence[Layer], device: torch.device) -> States:
    """The states of new layers; without delayed scaling none."""

    def new(columns: int) -> State:
        return torch.zeros(training.history, columns, device=device), torch.ones(columns, device=device)

    return {layer.prefix: Delayed(new(2), new(1)) for layer in layers} if training.history else {}


@dataclass
class Ground:
    """What the stages of one step are judged by, and where they go."""

    plan: Plan
    step: Step
    outcome: Outcome
    order: Callable[[Operands, Operands], Summation]
    """What the backend declares of the sums of a product."""
    free: bool = False
    """Whether the order in which its rotation adds is free."""
    own: bool = False
    """Whether it rounds by random bits of its own."""
    unseen: dict[str, None] = field(default_factory=dict)
    """What was not reported, and so not compared."""
    others: dict[str, Step] = field(default_factory=dict)
    """By the cause of an operand that is theirs: other forwards of the module."""
    unknown: dict[str, tuple[list[Quantized], list[Quantized]]] = field(default_factory=dict)
    """By name, operands of the gradients of weights that nobody knows for this step alone."""
    passes: int = -1
    """Number of backwards before that of the step. -1: as many as steps before it."""
    figures: bool = True
    """Whether more is measured than decides."""
    decoded: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    """By name, functions to the values of the quantized operands of the step, of the dtype of the layer."""

    def stage(self, name: str) -> str:
        """The name of a stage: which step, and what."""
        return f"{self.step.title} {name}"

    def seen(self, name: str) -> Any:
        """What the module reported of it; None, noted, where it did not."""
        found = self.step.last(name)
        if found is None:
            self.unseen[name] = None
        return found

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """A reported tensor of that shape, whatever dimensions it has. Raises BackendError where it is another."""
        found = self.seen(name)
        if found is None:
            return None
        return self._shaped(name, found, shape)

    def tensors(self, name: str, shape: tuple[int, ...]) -> list[torch.Tensor]:
        """The tensors of that shape reported under a name, in order. Raises as `tensor` does."""
        return [self._shaped(name, found, shape) for found in self.step.seen.get(name, [])]

    @staticmethod
    def _shaped(name: str, found: Any, shape: tuple[int, ...]) -> torch.Tensor:
        if not isinstance(found, torch.Tensor) or found.numel() != torch.Size(shape).numel():
            what = f"shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise BackendError(f"the module reported {name} as {what}, not as a tensor of shape {shape}")
        return found.reshape(shape)

    def high_precision(
        self,
        name: str,
        shape: tuple[int, ...],
        compute: Callable[..., Bounded],
        operands: Mapping[str, torch.Tensor | None],
        formula: str = "",
        *,
        expected: Bounded | None = None,
        **given: Any,
    ) -> torch.Tensor | None:
        """Judge a reported tensor of what stays in high precision, and give it; None where it was not reported.

        `compute`: the formula, from its `operands` by name, of which one that was not reported is None. `expected`: its
        result, if it is known already. `formula`, and what it is `given`: the known wrong formulas
        (`harness.diagnosis.formulas.explain_formula`).
        """
        found = self.tensor(name, shape)
        known = {key: operand for key, operand in operands.items() if operand is not None}
        if len(known) < len(operands):
            self.unseen[name] = None
            return found
        if found is not None:
            result = compute(**known) if expected is None else expected
            self.judge_formula(name, found, result, compute, known, formula, given)
        return found

    def judge_formula(
        self,
        name: str,
        found: torch.Tensor,
        expected: Bounded,
        compute: Callable[..., Bounded],
        operands: dict[str, torch.Tensor],
        formula: str,
        given: dict[str, Any],
    ) -> None:
        """Add the stage of a tensor in high precision, and keep the first wrong formula for a diagnosis."""
        stage = bounded_stage(self.stage(name), found, expected, self.plan.dtype, figures=self.figures)
        self.outcome.stages.append(stage)
        if self.outcome.formula is None and not stage.passed:
            others = {key: tensor for key, tensor in self.known_tensors() if key != name}
            self.outcome.formula = Formula(
                formula, stage.stage, given, found, expected, compute, operands, others, self.batches
            )  # fmt: skip

    @property
    def batches(self) -> int:
        """Batches of x. 1 for a grouped layer, whose sections have different numbers of rows."""
        return self.step.x.shape[0] if self.step.x.dim() > 2 else 1

    def known_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of the step and of other steps with their names: inputs, parameters, reported results."""
        for step, where in ((self.step, ""), *((other, f" of {other.title}") for other in self.others.values())):
            yield f"x{where}", step.x.flatten(0, -2)
            if not step.probe:
                yield f"dy{where}", step.dy.flatten(0, -2)
            yield from ((f"{name}{where}", tensor) for name, tensor in step.parameters.items())
            for name, values in step.seen.items():
                yield from ((f"{name}{where}", value) for value in values if isinstance(value, torch.Tensor))
        for name, decoded in self.decoded.items():
            yield f"the decoded {name}", decoded()


_TELLING = 10
"""Wrong outputs that tell a wrong operand."""


class LinearStages:
    """The stages of a layer of products in one step: forward, backward and the end of the step, in that order.

    Each is given the module's own result of the stage before. What it did not report is the reference's own, where that
    is what every right module has: an operand that is not rotated in a free order, and not rounded by bits that nobody
    knows. What follows from anything else is not compared, and is noted as unseen.
    """

    def __init__(self, ground: Ground, layer: Layer, states: States) -> None:
        """`states`: those of delayed scaling at present, which every end of a forward or backward moves."""
        self.ground, self.layer, self.delayed = ground, layer, states.get(layer.prefix, Delayed(None, None))
        self.plan, self.step = ground.plan, ground.step
        rows = ground.step.x.reshape(-1, ground.step.x.shape[-1]).shape[0]
        self.sizes = list(ground.plan.sections) if layer.groups else [rows]
        self._matrices: dict[str, Matrices] = {"w": self._weights}
        """The matrices of each role, which every half is quantized from."""
        self._operands: dict[Operand, list[Quantized] | None] = {}
        self._at_forward: State | None = None
        self._forward: State | None = None
        """The right state of input and weight after the forward."""
        self._reported_forward: State | None = None
        self._given: dict[int, tuple[torch.Tensor, ...]] = {}
        """Arguments of the updates of delayed scaling: 0 of input and weight, 1 of the gradient."""

    @property
    def _training(self) -> TrainingRecipe:
        return self.plan.training

    def forward(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """Judge x·wᵀ + bias of `x` (M, K), or of an input that nobody knows. Gives y (M, N), where it was reported."""
        self._matrices["x"] = self._padded(x)
        self._at_forward = self.delayed.forward
        bias = [self.step.parameters[name] for name in self.layer.biases] if self.plan.bias else None
        return self._products("y", "y", self.layer.outer, bias=bias)

    def backward(self, dy: torch.Tensor | None, gradient: str = "dx") -> torch.Tensor | None:
        """Judge the products with `dy` (M, N), and its sum. Gives that with w (M, K), which has the name `gradient`."""
        self._matrices["dy"] = self._padded(dy)
        frozen, dx = self.plan.use, None
        if frozen != "frozen-input" or self.layer.prefix or self.layer.norm:
            dx = self._products("dx", gradient, self.layer.inner)
        if frozen == "frozen-weight":
            self._no_weight_gradients()
        else:
            self._weight_gradients()
        if self.plan.bias:
            self._bias_gradients(dy)
        return dx

    # ---- delayed scaling -------------------------------------------------------------------------------------------

    def end_forward(self, *, recorded: bool = False) -> None:
        """Move the state of input and weight. Judge it after a probe, which has no backward.

        `recorded`: another forward follows in the same autocast, so that the amaxes are recorded and nothing else.
        """
        if not self._training.history:
            return
        if recorded:
            self.delayed.forward = self._recorded(0, self._at_forward, PRODUCTS["y"])
            return
        before, expected = self._at_forward, self._updated(0, self._at_forward, PRODUCTS["y"], self._training.input)
        self._forward = expected
        found = self._reported_states()
        if self.step.probe:
            if not found or before is None or expected is None:
                self.ground.unseen |= dict.fromkeys(self.layer.prefix + name for name in ("history", "scale"))
                # A module may leave the state alone if no gradient is wanted.
                known = self.plan.use != "no-grad" and not found
                self.delayed.forward = expected if known else found[-1][0] if found else None
                return
            self.delayed.forward = found[-1][0]
            kept = self.plan.use == "no-grad" and all(map(torch.equal, found[-1][0], before))
            grad = self.delayed.grad or found[-1][1]
            self._judge_states(found[-1], Delayed(before if kept else expected, grad), Delayed(before, grad))
            return
        self.delayed.forward = expected
        if self.plan.pending and len(found) > 1:  # the first report is that of the forward
            self._reported_forward = self.delayed.forward = found[0][0]

    def share_forward(self, last: Any) -> None:
        """Take the state of input and weight after the last forward of the autocast for that after this forward.

        `last`: stages of that forward, of the same kind.
        """
        self._forward, self._reported_forward = last._forward, last._reported_forward
        self._given |= {number: given for number, given in last._given.items() if number == 0}

    def end(self) -> None:
        """Move the state of the gradient, and judge history and scales after the step."""
        if not self._training.history:
            return
        row, column = (Operand("dy", half) for half in Half)
        before = self.delayed.grad
        expected = self._updated(1, before, [row if self._operands.get(row) else column], self._training.grad)
        found, forward = self._reported_states(), self._forward
        pending = self.plan.pending
        self.delayed.grad = expected
        if not found or forward is None or expected is None or self._at_forward is None:
            self.ground.unseen |= dict.fromkeys(self.layer.prefix + name for name in ("history", "scale"))
        else:
            last = found[-1]
            if pending:  # other forwards have moved the state of input and weight
                last = self._reported_forward or forward, last[1]
            self._judge_states(last, Delayed(forward, expected), Delayed(self._at_forward, before))
        if found:
            self.delayed.forward, self.delayed.grad = found[-1]

    def _reported_states(self) -> list[tuple[State, State]]:
        """The states of input and weight, and of the gradient, each time that the module reported both tensors."""
        ground, prefix = self.ground, self.layer.prefix
        history = ground.tensors(prefix + "history", (self._training.history, 3))
        scale = ground.tensors(prefix + "scale", (3,))
        if len(history) != len(scale):
            history, scale = history[-1:], scale[-1:]
        return [
            ((one[:, :GRAD], other[:GRAD]), (one[:, GRAD:], other[GRAD:]))
            for one, other in zip(history, scale, strict=False)
        ]

    def _judge_states(self, found: tuple[State, State], expected: Delayed, before: Delayed) -> None:
        parts = zip(found, (expected.forward, expected.grad), (before.forward, before.grad), strict=True)
        recipes = (self._training.input, self._training.grad)
        joined: list[State] = []
        for number, ((history, scale), right, _) in enumerate(parts):
            assert right is not None
            for name, one, other in (("history", history, right[0]), ("scale", scale, right[1])):
                if not torch.equal(one, other) and number in self._given:
                    before_update, scale_before, of_sections = self._given[number]
                    search: CauseSearch = partial(
                        wrong_scales, before_update, scale_before, dense(one), recipes[number]
                    )
                    if name == "history":
                        search = partial(
                            wrong_histories, before_update, scale_before, dense(one), recipes[number],
                            of_sections=of_sections,
                        )  # fmt: skip
                    self._note_causes(name, search)
        for state in (found, (expected.forward, expected.grad), (before.forward, before.grad)):
            columns = [part for part in state if part is not None]
            joined.append((torch.cat([h for h, _ in columns], -1), torch.cat([s for _, s in columns], -1)))
        (history, scale), right, old = joined
        stages = self.ground.outcome.stages
        stages.append(history_stage(self._stage("history"), history, right[0], old[0]))
        stages.append(scale_stage(self._stage("scale"), scale, right[1], old))

    def _updated(self, number: int, state: State | None, operands: Sequence[Operand], recipe: Recipe) -> State | None:
        """The state after an update, by number, of the amaxes of the module's own operands; None where one is
        unknown."""
        recorded = self._recorded(number, state, operands)
        return None if recorded is None else reference.update_scale(*recorded, recipe)

    def _recorded(self, number: int, state: State | None, operands: Sequence[Operand]) -> State | None:
        """The state with the amaxes of the module's own operands in the first row; None where one is unknown."""
        if state is None:
            return None
        history, scale = (tensor.clone() for tensor in state)
        of_sections: list[torch.Tensor] = []
        for place, operand in enumerate(operands):
            halves = self._operands.get(operand)
            if halves is None or any(q.amax is None for q in halves):
                return None
            amaxes = [q.amax.max() for q in halves if q.amax is not None]
            before = history[0, place].clone()
            history[0, place] = torch.stack([before, *amaxes]).amax()
            of_sections.append(torch.stack([torch.maximum(before, amax) for amax in amaxes]))
        together = torch.stack(of_sections, 1) if len({len(column) for column in of_sections}) == 1 else history[:1]
        self._given[number] = history.clone(), scale.clone(), together
        return history, scale

    # ---- operands --------------------------------------------------------------------------------------------------

    @property
    def _weights(self) -> list[torch.Tensor]:
        return [self.step.parameters[name] for name in self.layer.weights]

    def _padded(self, x: torch.Tensor | None) -> Matrices:
        """The sections of a matrix, padded where the layer has groups."""
        if x is None or not self.layer.groups:
            return None if x is None else [x]
        sizes = torch.tensor(self.sizes, device=x.device)
        padded, aligned = reference.pad_sections(x, sizes, self._training.input)
        return list(torch.split(padded, aligned.tolist()))

    def _rows(self) -> list[int]:
        alignment = self._training.input.row_alignment if self.layer.groups else 1
        return [-(-size // alignment) * alignment for size in self.sizes]

    def _recipe(self, operand: Operand) -> Recipe:
        training = self._training
        return operand.half.recipe({"x": training.input, "w": training.weight, "dy": training.grad}[operand.role])

    def _random(self, operand: Operand) -> tuple[int, int] | None:
        """Seed and offset of an operand; None if its recipe does not round stochastically."""
        if self._recipe(operand).rounding != "stochastic":
            return None
        passes = self.step.number if self.ground.passes < 0 else self.ground.passes
        seed, offset = self.plan.seed + self._seed_offset, 2 * passes
        return operand.half.pick(((seed, offset), (seed, offset + 1)))

    def _pair(self, product: str) -> list[list[Quantized] | None]:
        """Both operands of a product, `_judged`."""
        self._operands |= {operand: self._judged(operand) for operand in PRODUCTS[product]}
        return [self._operands[operand] for operand in PRODUCTS[product]]

    def _judged(self, operand: Operand) -> list[Quantized] | None:
        """One operand: as the module reported it, its stages judged, or the reference's own. None where it was not
        reported, and is not what every right module has."""
        ground, key, recipe = self.ground, self.layer.prefix + operand.name, self._recipe(operand)
        own = ground.own and recipe.rounding == "stochastic"
        matrices, random = self._matrices.get(operand.role), self._random(operand)
        unknown = matrices is None or (bool(self._training.history) and self._state(operand.role) is None)
        oracles = None if matrices is None or unknown else self._oracles(operand, matrices, random)
        found = ground.seen(key)
        if found is None:
            return None if own or (ground.free and recipe.transform is not None) else oracles
        kernels = self._reported(operand, found)
        if matrices is None or oracles is None:
            ground.unseen[key] = None
            return kernels
        parts, judged = [], []
        first = 0
        for matrix, kernel, oracle in zip(matrices, kernels, oracles, strict=True):
            subject = Subject.of_half(operand.half, matrix, recipe, random, first=first, free=ground.free, own=own)
            first += oracle.scales.numel()
            stages, one = quantize_stages(subject, kernel, oracle, ground.stage(key) + ".")
            parts.append(stages)
            judged.append(one)
        ground.decoded[key] = partial(self._decoded, [one.kernel for one in judged], operand)
        self._note_origin(operand, found, parts, kernels)
        self._add(parts)
        ground.outcome.judged += judged
        return [one.kernel for one in judged]

    def _decoded(self, kernels: list[Quantized], operand: Operand) -> torch.Tensor:
        """The values of the sections of an operand, as rows of the matrix that it was quantized from."""
        values = [reference.dequantize(q, dtype=self.plan.dtype) for q in kernels]
        return torch.cat([v.T.contiguous() if operand.half is Half.COLUMN else v for v in values])

    def _note_origin(
        self, operand: Operand, found: Any, parts: list[list[StageResult]], kernels: list[Quantized]
    ) -> None:
        """Where operands are wrong, whether they are those of the step before, or made of the other half."""
        wrong = [stage for stages in parts for stage in stages if not stage.passed]
        if not wrong:
            return
        for cause, other in self.ground.others.items():
            if _same(found, other.last(self.layer.prefix + operand.name)):
                wrong[0].causes.append(cause)
        if self.layer.groups and self._padding_alone(parts, kernels):
            wrong[0].causes.append("padding-not-zeroed")
        rows = self._operands.get(Operand(operand.role, Half.ROW))
        if operand.half is Half.COLUMN and rows is not None and _made_of(rows, kernels):
            wrong[0].causes.append("quantized-twice")

    def _padding_alone(self, parts: list[list[StageResult]], kernels: list[Quantized]) -> bool:
        """Whether all wrong elements lie in rows of padding, and the codes of these rows are not all 0."""
        not_zero = False
        for size, stages, kernel in zip(self.sizes, parts, kernels, strict=True):
            wrong = [stage.wrong_elements for stage in stages if not stage.passed]
            if any(mask is None or len(mask) != kernel.shape[0] or bool(mask[:size].any()) for mask in wrong):
                return False
            magnitude = 0x77 if kernel.recipe.element.bits == 4 else 0x7F
            not_zero |= bool(wrong) and bool((kernel.codes.view(torch.uint8)[size:] & magnitude).any())
        return not_zero

    def _state(self, role: str) -> State | None:
        """The state that scales an operand: that of the forward, or at a backward that of the gradient."""
        return self.delayed.grad if role == "dy" else self._at_forward

    @property
    def _seed_offset(self) -> int:
        """Layers of a transformer layer have its seed and the three behind it."""
        return self.plan.layers.index(self.layer)

    def _oracles(
        self, operand: Operand, matrices: Sequence[torch.Tensor], random: tuple[int, int] | None
    ) -> list[Quantized]:
        recipe = self._recipe(operand)
        sizes = torch.tensor([len(matrix) for matrix in matrices], device=matrices[0].device)
        scale = None
        if recipe.tensor_scale == "given" and (state := self._state(operand.role)) is not None:
            scale = state[1][COLUMNS[operand.role] % GRAD].expand(len(matrices)).contiguous()
        grouped = reference.quantize_grouped(
            torch.cat(list(matrices)), sizes, recipe, columnwise=operand.half is Half.COLUMN, scale=scale, random=random
        )
        return grouped.sections()

    def _reported(self, operand: Operand, found: Any) -> list[Quantized]:
        """What was reported as the Quantized of each section. Raises BackendError where it is none."""
        half, name, recipe = operand.half, operand.name, self._recipe(operand)
        if operand.role == "w":
            shapes = [(self.layer.outer, self.layer.inner)] * len(self.layer.weights)
        else:
            width = self.layer.inner if operand.role == "x" else self.layer.outer
            shapes = [(rows, width) for rows in self._rows()]
        whole = found if isinstance(found, list) and self.layer.groups else [found]
        if len(whole) != len(shapes):
            raise BackendError(f"the module reported {name} of {len(whole)} sections; there are {len(shapes)}")
        like = torch.empty(0, device=self.step.x.device)
        return [
            as_quantized(
                one, like, recipe, shape=half.shape(shape), transposed=half.transposed(recipe),
                layout=TILES if isinstance(one, dict) and one.get("swizzled") else LINEAR,
                method=f"the reported {name}",
            )
            for one, shape in zip(whole, shapes, strict=True)
        ]  # fmt: skip

    # ---- products --------------------------------------------------------------------------------------------------

    def _products(
        self, product: str, name: str, width: int, *, bias: list[torch.Tensor] | None = None
    ) -> torch.Tensor | None:
        """Judge a product (M, `width`) of PRODUCTS (+ bias), reported as `name`, and give it. The rows of padding of a
        section are cut off."""
        a, b = self._pair(product)
        found = self.ground.tensor(self.layer.prefix + name, (sum(self.sizes), width))
        if a is None or b is None or found is None:
            self.ground.unseen[self.layer.prefix + name] = None
            return found
        stages = []
        order = self.ground.order(a, b) if self.layer.groups else self.ground.order(a[0], b[0])
        for number, (left, right, part) in enumerate(zip(a, b, torch.split(found, self.sizes), strict=True)):
            given = {"c": None, "bias": None if bias is None else bias[number]}
            stages.append([self._product(product, name, number, (left, right), part, order, given)])
        self._add(stages)
        return found

    def _product(
        self,
        product: str,
        name: str,
        number: int,
        pair: tuple[Quantized, Quantized],
        output: torch.Tensor,
        order: Summation,
        given: dict[str, torch.Tensor | None],
    ) -> StageResult:
        """Judge the rows of a @ b.T (+ c) (+ bias) of a section that are in `output`, and keep them for a diagnosis.
        `given`: c and bias."""
        ground, stage = self.ground, self._stage(name)
        dtype = torch.float32 if product == "dw" and self.plan.accumulate else self.plan.dtype
        limits = _cut(bounds(*pair, out_dtype=dtype, order=order, c=given["c"], bias=given["bias"]), len(output))
        left = _first_rows(pair[0], len(output))
        ground.outcome.products.append(
            Product(
                left, pair[1], given["c"], given["bias"], output, limits, order, stage,
                lambda: dict(ground.known_tensors()), 1 if product == "dw" else ground.batches,
            )
        )  # fmt: skip
        result = output_stage(stage, output, limits, figures=ground.figures)
        if not result.passed:
            self._note_other_operands(result, product, number, pair, output, order, given)
        return result

    def _weight_gradients(self) -> None:
        a, b = self._pair("dw")
        if a is None or b is None or self._unknown("dw"):
            self.ground.unseen[self.layer.prefix + "dw"] = None
            if a is not None and b is not None:
                self.ground.unknown[self.layer.prefix + "dw"] = a, b
            return
        found = self._each("dw")
        stages = []
        for number, (name, left, right, dw) in enumerate(zip(self.layer.weights, a, b, found, strict=True)):
            if dw is None:
                stages.append([self._absent("dw", name, left.shape[0] * right.shape[0])])
                continue
            c = self.step.before.get(name)
            given = {"c": c, "bias": None}
            stage = self._product("dw", "dw", number, (left, right), dw, self.ground.order(left, right), given)
            early = self.step.early.get(name)
            if stage.passed and early is not None and (c is None or not equal_bits(early, c)):
                stage.mismatches, stage.sentence = dw.numel(), f"{name} has its gradient before backward_dw is called"
                stage.causes.append("gradient-too-early")
            stages.append([stage])
        self._add(stages)

    def _no_weight_gradients(self) -> None:
        """Judge that weights that need no gradient have none, and that a main gradient is as it was."""
        stages = []
        for name, dw in zip(self.layer.weights, self._each("dw"), strict=True):
            size, before = self.layer.inner * self.layer.outer, self.step.before.get(name)
            stage = StageResult(self._stage("dw"), "exact", size)
            if dw is not None and (before is None or not equal_bits(dw, before)):
                stage.mismatches, stage.causes = size, ["gradient-not-wanted"]
                change = "grad is not None" if before is None else "main_grad changed"
                stage.sentence = f"{name} needs no gradient, and its {change}"
            stages.append([stage])
        self._add(stages)

    def _note_other_operands(
        self,
        stage: StageResult,
        product: str,
        number: int,
        operands: tuple[Quantized, Quantized],
        output: torch.Tensor,
        order: Summation,
        given: dict[str, torch.Tensor | None],
    ) -> None:
        """Whether a wrong product of a section is that of operands of another forward of the module, or of a half that
        is made of the other half."""
        sources: dict[str, Callable[[Operand], Quantized | None]] = {
            cause: partial(self._other_operand, other, number=number) for cause, other in self.ground.others.items()
        }
        if stage.mismatches >= _TELLING:
            sources["quantized-twice"] = partial(self._made_twice, number=number)
        for cause, source in sources.items():
            pairs = list(zip(operands, map(source, PRODUCTS[product]), strict=True))
            for choice in ((0, 1), (1, 0), (1, 1)):
                a, b = (pair[which] for pair, which in zip(pairs, choice, strict=True))
                if a is None or b is None:
                    continue
                limits = bounds(a, b, out_dtype=output.dtype, order=order, c=given["c"], bias=given["bias"])
                if output_stage(stage.stage, output, _cut(limits, len(output)), figures=False).passed:
                    stage.causes.append(cause)
                    return

    def _made_twice(self, operand: Operand, number: int) -> Quantized | None:
        """A columnwise section that is made of the decoded values of the rowwise one, if a right module knows both."""
        rows = self._operands.get(Operand(operand.role, Half.ROW))
        if operand.half is Half.ROW or rows is None:
            return None
        return _twice_quantized(rows[number], self._recipe(operand))

    def _other_operand(self, other: Step, operand: Operand, number: int) -> Quantized | None:
        """A section of an operand in another forward: as reported, else of a weight the reference's own."""
        found = other.last(self.layer.prefix + operand.name)
        if found is not None:
            return self._reported(operand, found)[number]
        role = operand.role
        if role == "dy" or self._training.history or (role == "x" and (self.layer.prefix or self.layer.norm)):
            return None
        matrices: Sequence[torch.Tensor] = [other.parameters[weight] for weight in self.layer.weights]
        if role == "x":
            matrices = self._padded(other.x.flatten(0, -2)) or []
        return self._oracles(operand, matrices, None)[number]

    def _bias_gradients(self, dy: torch.Tensor | None) -> None:
        if dy is None or self._unknown("dbias"):
            self.ground.unseen[self.layer.prefix + "dbias"] = None
            return
        found = self._each("dbias")
        stages = []
        for name, part, dbias in zip(self.layer.biases, torch.split(dy, self.sizes), found, strict=True):
            if dbias is None:
                stages.append([self._absent("dbias", name, part.shape[1])])
            else:
                stages.append([self._bias_gradient(part, dbias)])
        self._add(stages)

    def _bias_gradient(self, dy: torch.Tensor, dbias: torch.Tensor) -> StageResult:
        """Judge the sum of the rows of `dy`, those of a section."""
        self.ground.judge_formula(
            self.layer.prefix + "dbias", dbias, column_sum(dy), column_sum, {"dy": dy}, "column-sum", {"rows": dy}
        )  # fmt: skip
        return self.ground.outcome.stages.pop()

    def _unknown(self, name: str) -> bool:
        """Whether nobody knows the gradient of this step alone: of pending steps that the module does not report."""
        return self.plan.pending and self.layer.prefix + name not in self.step.seen

    def _each(self, name: str) -> list[Any]:
        """A gradient of every section, None of those that have none."""
        found = self.step.last(self.layer.prefix + name)
        return list(found) if self.layer.groups else [found]

    def _absent(self, name: str, parameter: str, size: int) -> StageResult:
        sentence = f"{parameter} has no gradient"
        return StageResult(self._stage(name), "bound", size, size, sentence=sentence, causes=["gradient-missing"])

    # ---- stages ----------------------------------------------------------------------------------------------------

    def _stage(self, name: str) -> str:
        return self.ground.stage(self.layer.prefix + name)

    def _add(self, parts: list[list[StageResult]]) -> None:
        """Keep the stages of every section as one."""
        self.ground.outcome.stages += merge_stages(parts, "section") if len(parts) > 1 else parts[0]

    def _note_causes(self, name: str, search: CauseSearch) -> None:
        """Keep the known mistakes of a stage where it is the first that is wrong, for a diagnosis."""
        outcome = self.ground.outcome
        if not outcome.causes and all(stage.passed for stage in outcome.stages):
            outcome.causes[self._stage(name)] = search


def _same(one: Any, other: Any) -> bool:
    """Whether two reports of an operand are the same: tensors, and lists and mappings of them."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _made_of(rows: list[Quantized], columns: list[Quantized]) -> bool:
    """Whether columnwise halves are those of the decoded values of the rowwise ones."""
    made = ((_twice_quantized(row, half.recipe), half) for row, half in zip(rows, columns, strict=True))
    return all(one is not None and torch.equal(one.codes, half.codes) for one, half in made)


def _twice_quantized(row: Quantized, recipe: Recipe) -> Quantized | None:
    """The columnwise half of the decoded values of a rowwise one. None if these values do not determine it."""
    if recipe.transform or recipe.rounding == "stochastic" or recipe.tensor_scale == "given":
        return None
    return reference.quantize_both(reference.dequantize(row), recipe, rowwise=False)[1]


def _first_rows(q: Quantized, rows: int) -> Quantized:
    """An operand without the rows of padding behind these, each of which has scales of its own, or none has."""
    if q.shape[0] == rows:
        return q
    scales = q.scales if q.recipe.whole else q.scales[:rows]
    return replace(q, codes=q.codes[:rows], scales=scales, shape=(rows, q.shape[1]))


def _cut(limits: Bounds, rows: int) -> Bounds:
    """Those of the first rows."""
    return Bounds(*(getattr(limits, one.name)[:rows] for one in fields(Bounds)))
