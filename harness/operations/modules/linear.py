"""A linear layer, forward and backward: operands by role, three products, the bias, the amax history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import BackendError
from narrowgauge.harness.backends.module_driver import Step
from narrowgauge.harness.backends.results import as_quantized
from narrowgauge.harness.cases.layers import Layer
from narrowgauge.harness.checks.bit_equality import different_bits, equal_bits
from narrowgauge.harness.checks.rotation_interval import rotated_interval
from narrowgauge.harness.checks.stage import StageResult, merge_stages
from narrowgauge.harness.operations.modules.delayed import DelayedStages, States
from narrowgauge.harness.operations.modules.ground import Ground
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.oracle import bounds, column_sum
from narrowgauge.harness.operations.stages.outcome import Product
from narrowgauge.harness.operations.stages.output import output_stage
from narrowgauge.harness.operations.stages.quantized import Subject, quantize_stages
from narrowgauge.reference.bounds.bounds import Bounds
from narrowgauge.reference.high_precision.bounded import Bounded
from narrowgauge.spec.modules.training import TrainingRecipe
from narrowgauge.spec.quantized import Half, Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LINEAR, TILES
from narrowgauge.spec.summation import Summation

COLUMNS = {"x": 0, "w": 1, "dy": 2}
"""Column of the amax history, and index of the scale, of a role of an operand."""
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
"""Operands of the products of a layer."""

Matrices = Sequence[torch.Tensor] | None
"""A matrix per section; None: unknown."""


_TELLING = 10
"""Number of wrong outputs that proves a wrong operand."""


class LinearStages:
    """The stages of a layer of products in one step: forward, backward and the end of the step, in that order.

    A stage is judged given the module's own result of the stage before. If the module does not report an operand, the
    reference's operand takes its place, provided that every right module has these bytes: no rotation in a free order,
    no unknown random bits. Without such an operand a result is not compared, and is noted as unseen.
    """

    def __init__(self, ground: Ground, layer: Layer, states: States) -> None:
        """`states`: as of `DelayedStages`."""
        self.ground, self.layer = ground, layer
        self.delayed = DelayedStages(ground, layer.prefix, states, (GRAD, 1))
        self.plan, self.step = ground.plan, ground.step
        rows = ground.step.x.reshape(-1, ground.step.x.shape[-1]).shape[0]
        self.sizes = list(ground.plan.sections) if layer.groups else [rows]
        self._matrices: dict[str, Matrices] = {"w": self._weights}
        """The matrices of the roles, before quantization."""
        self._operands: dict[Operand, list[Quantized] | None] = {}
        self._ends: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None
        self._certain: dict[Operand, torch.Tensor] = {}
        """Rows of an operand that every right module has, bool; of an operand that is not here, all rows."""
        self.unreported: dict[str, Bounded] = {}
        """Products that were not reported, by name, of operands that every right module has."""

    @property
    def _training(self) -> TrainingRecipe:
        return self.plan.training

    def forward(
        self, x: torch.Tensor | None, ends: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None
    ) -> torch.Tensor | None:
        """Judge x·wᵀ + bias of `x` (M, K), or of an input that nobody knows. Gives y (M, N), where it was reported.

        `ends`: the least and the greatest number of each element of an input that was not reported. Outputs are judged
        if their operands are the same for all numbers between.
        """
        self._matrices["x"], self._ends = self._padded(x), ends
        self.delayed.begin()
        bias = [self.step.parameters[name] for name in self.layer.biases] if self.plan.bias else None
        return self._products("y", "y", self.layer.outer, bias=bias)

    def backward(self, dy: torch.Tensor | None, gradient: str = "dx") -> torch.Tensor | None:
        """Judge the products with `dy` (M, N), and its sum. Returns the product with w (M, K), named `gradient`."""
        self._matrices["dy"] = self._padded(dy)
        frozen, dx = self.plan.use, None
        if frozen != "frozen-input" or not self.layer.first:
            dx = self._products("dx", gradient, self.layer.inner)
        if frozen == "frozen-weight":
            self._no_weight_gradients()
        else:
            self._weight_gradients()
        if self.plan.bias:
            self._bias_gradients(dy)
        return dx

    def end_forward(self, *, recorded: bool = False) -> None:
        """`DelayedStages.end_forward` of input and weight."""
        self.delayed.end_forward([self._amaxes(operand) for operand in PRODUCTS["y"]], recorded=recorded)

    def share_forward(self, last: Any) -> None:
        """`DelayedStages.share_forward`. `last`: stages of the same kind."""
        self.delayed.share_forward(last.delayed)

    def end(self) -> None:
        """`DelayedStages.end` of the gradient."""
        row, column = (Operand("dy", half) for half in Half)
        self.delayed.end([self._amaxes(row if self._operands.get(row) else column)])

    # ---- operands --------------------------------------------------------------------------------------------------

    def _amaxes(self, operand: Operand) -> torch.Tensor | None:
        """Amaxes of the sections of an operand, float32 (sections,)."""
        amaxes = [q.amax for q in self._operands.get(operand) or ()]
        known = [amax.max() for amax in amaxes if amax is not None]
        return torch.stack(known) if known and len(known) == len(amaxes) else None

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
        seed, offset = self.plan.seed + self._seed_offset, 2 * self._passes
        return operand.half.pick(((seed, offset), (seed, offset + 1)))

    @property
    def _passes(self) -> int:
        """Backward passes before that of the step."""
        return self.step.number if self.ground.passes < 0 else self.ground.passes

    def _pair(self, product: str) -> list[list[Quantized] | None]:
        """Both operands of a product, `_judged`."""
        self._operands |= {operand: self._judged(operand) for operand in PRODUCTS[product]}
        return [self._operands[operand] for operand in PRODUCTS[product]]

    def _judged(self, operand: Operand) -> list[Quantized] | None:
        """An operand: the module's report, with judged stages, or the reference's own. None without a report, if right
        modules may have different bytes."""
        ground, key, recipe = self.ground, self.layer.prefix + operand.name, self._recipe(operand)
        own = ground.own and recipe.rounding == "stochastic"
        matrices, random = self._matrices.get(operand.role), self._random(operand)
        unknown = matrices is None or (
            bool(self._training.history) and self.delayed.scale(COLUMNS[operand.role]) is None
        )
        oracles = None if matrices is None or unknown else self._oracles(operand, matrices, random)
        found = ground.seen(key)
        if found is None:
            if own or (self.layer.groups and (matrices is None or recipe.transform is not None)):
                return None
            if matrices is None:
                return self._between(operand, *self._ends()) if operand.role == "x" and self._ends else None
            if ground.free and recipe.transform is not None:
                return self._between(operand, *_rotated_ends(matrices[0], operand.half, recipe))
            if oracles is not None and recipe.transform is None:
                ground.known[f"the decoded {key}"] = partial(self._decoded, oracles, operand)
            return oracles
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
        ground.known[f"the decoded {key}"] = partial(self._decoded, [one.kernel for one in judged], operand)
        self._note_origin(operand, found, parts, kernels)
        self._add(parts)
        ground.outcome.judged += judged
        return [one.kernel for one in judged]

    def _between(self, operand: Operand, low: torch.Tensor, high: torch.Tensor) -> list[Quantized] | None:
        """An operand of numbers between two ends; None if its scales, or all of its rows, are not the same for both."""
        recipe = self._recipe(operand)
        plain = replace(recipe, transform=None)
        swap = low.abs() > high.abs()
        across = low.signbit() != high.signbit()  # amaxes rise with magnitudes, codes with numbers
        small = torch.where(swap, high, low).masked_fill(across, 0)
        large = torch.where(swap, low, high)
        if not bool(large.isfinite().all()):
            return None
        random = self._random(operand)
        (one,), (other,) = (self._oracles(operand, [matrix], random, plain) for matrix in (small, large))
        amaxes = [q.amax for q in (one, other) if q.amax is not None]
        if not torch.equal(one.scales, other.scales) or (amaxes and not torch.equal(*amaxes)):
            return None
        values = [reference.dequantize(q) for q in (one, other)]
        certain = ~different_bits(*values).any(1) & ~(across.T if operand.half is Half.COLUMN else across).any(1)
        if not bool(certain.any()):
            return None
        self._certain[operand] = certain
        return [replace(one, recipe=recipe)]

    def _decoded(self, kernels: list[Quantized], operand: Operand) -> torch.Tensor:
        """The values of the sections of an operand, as rows of its matrix before quantization."""
        values = [reference.dequantize(q, dtype=self.plan.dtype) for q in kernels]
        return torch.cat([v.T.contiguous() if operand.half is Half.COLUMN else v for v in values])

    def _note_origin(
        self, operand: Operand, found: Any, parts: list[list[StageResult]], kernels: list[Quantized]
    ) -> None:
        """Causes of a wrong operand: the operand of the step before, zeros missing in the padding, quantized twice."""
        wrong = [stage for stages in parts for stage in stages if not stage.passed]
        if not wrong:
            return
        self.ground.note_origin(self.layer.prefix + operand.name, found, wrong)
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

    @property
    def _seed_offset(self) -> int:
        """The layers of a transformer layer have its seed and the next three seeds."""
        return self.plan.layers.index(self.layer)

    def _oracles(
        self,
        operand: Operand,
        matrices: Sequence[torch.Tensor],
        random: tuple[int, int] | None,
        other: Recipe | None = None,
    ) -> list[Quantized]:
        """The sections of an operand by its recipe, or by another one."""
        recipe = other or self._recipe(operand)
        sizes = torch.tensor([len(matrix) for matrix in matrices], device=matrices[0].device)
        scale = None
        if recipe.tensor_scale == "given" and (given := self.delayed.scale(COLUMNS[operand.role])) is not None:
            scale = given.expand(len(matrices)).contiguous()
        grouped = reference.quantize_grouped(
            torch.cat(list(matrices)), sizes, recipe, columnwise=operand.half is Half.COLUMN, scale=scale, random=random
        )
        return grouped.sections()

    def _reported(self, operand: Operand, found: Any) -> list[Quantized]:
        """The report as a Quantized per section. Raises BackendError for a report without a Quantized."""
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
            if a is not None and b is not None and not self.layer.groups:
                order = self.ground.order(a[0], b[0])
                limits = bounds(a[0], b[0], out_dtype=self.plan.dtype, order=order)
                error = limits.budget.masked_fill(limits.undetermined, torch.inf)
                self.unreported[name] = Bounded(limits.centre, error)
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
        free = self._free(product, limits)
        if free is None:
            left = _first_rows(pair[0], len(output))
            ground.outcome.products.append(
                Product(
                    left, pair[1], given["c"], given["bias"], output, limits, order, stage,
                    lambda: dict(ground.known_tensors()), 1 if product == "dw" else ground.batches,
                )
            )  # fmt: skip
        else:
            limits = _freed(limits, free)
        result = output_stage(stage, output, limits, figures=ground.figures)
        result.compared -= 0 if free is None else int(free.count_nonzero())
        if not result.passed:
            self._note_other_operands(result, product, number, pair, output, order, given)
        return result

    def _free(self, product: str, limits: Bounds) -> torch.Tensor | None:
        """The outputs of a product of which right modules may have other operands, bool (M, N); None if none has."""
        left, right = (self._certain.get(operand) for operand in PRODUCTS[product])
        free = torch.zeros_like(limits.exact)
        if left is not None:
            free |= ~left.unsqueeze(1)
        if right is not None:
            free |= ~right.unsqueeze(0)
        return free if bool(free.any()) else None

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
        """Judge that frozen weights have no gradient, and that a main gradient is unchanged."""
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
        sources: list[tuple[str, Callable[[Operand], Quantized | None]]] = [
            (cause, partial(self._other_operand, other, number=number)) for cause, other in self.ground.others.items()
        ]
        if stage.mismatches >= _TELLING:
            sources.append(("quantized-twice", partial(self._made_twice, number=number)))
            sources.append(("operand-not-rotated", partial(self._unrotated, number)))
            sources += [("recipe-of-another-operand", partial(self._by_recipe_of, role, number)) for role in COLUMNS]
            sources += [(cause, partial(self._by_bits, offset, number)) for cause, offset in self._other_offsets()]
        for cause, source in sources:
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
        """A columnwise section made of the decoded values of the rowwise section, if a right module knows both."""
        rows = self._operands.get(Operand(operand.role, Half.ROW))
        if operand.half is Half.ROW or rows is None:
            return None
        return _twice_quantized(rows[number], self._recipe(operand))

    def _by_recipe_of(self, role: str, number: int, operand: Operand) -> Quantized | None:
        """A section of an operand by the recipe of the operand of another role."""
        recipe, own = self._recipe(Operand(role, operand.half)), self._recipe(operand)
        known = self._matrices.get(operand.role)
        if known is None or recipe == own or recipe.tensor_scale == "given" or recipe.transform or own.transform:
            return None
        random = self._random(operand) if recipe.rounding == "stochastic" else None
        if recipe.rounding == "stochastic" and random is None:
            return None
        return self._oracles(operand, known, random, recipe)[number]

    def _unrotated(self, number: int, operand: Operand) -> Quantized | None:
        """A section of an operand that is quantized without its rotation."""
        recipe, known = self._recipe(operand), self._matrices.get(operand.role)
        if known is None or recipe.transform is None:
            return None
        plain = self._oracles(operand, known, self._random(operand), replace(recipe, transform=None))
        return replace(plain[number], recipe=recipe)

    def _other_offsets(self) -> list[tuple[str, int]]:
        """Wrong offsets of the random bits of the rowwise half, with their causes."""
        passes = self._passes
        others = dict.fromkeys(offset for offset in (0, 2 * passes - 2, 2 * passes + 2) if 0 <= offset != 2 * passes)
        found = [("random-bits-of-another-backward", offset) for offset in others]
        return [*found, ("random-offset-grows-by-one", passes)]

    def _by_bits(self, offset: int, number: int, operand: Operand) -> Quantized | None:
        """A section of an operand that is rounded by the random bits of another offset of the rowwise half."""
        known, right = self._matrices.get(operand.role), self._random(operand)
        if known is None or right is None or self._recipe(operand).transform is not None:
            return None
        random = right[0], offset + (operand.half is Half.COLUMN)
        return None if random == right else self._oracles(operand, known, random)[number]

    def _other_operand(self, other: Step, operand: Operand, number: int) -> Quantized | None:
        """A section of an operand in a different forward: as reported; else the reference's own, for known matrices."""
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
        """Judge the sum of the rows of `dy` of a section."""
        self.ground.judge_formula(
            self.layer.prefix + "dbias", dbias, column_sum(dy), column_sum, {"dy": dy}, "column-sum", {"rows": dy}
        )  # fmt: skip
        return self.ground.outcome.stages.pop()

    def _unknown(self, name: str) -> bool:
        """Whether the gradient of this step alone is unknown: of pending steps without a report."""
        return self.plan.pending and self.layer.prefix + name not in self.step.seen

    def _each(self, name: str) -> list[Any]:
        """The gradients of the sections; None without a gradient."""
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


def _made_of(rows: list[Quantized], columns: list[Quantized]) -> bool:
    """Whether columnwise halves are made of the decoded values of the rowwise halves."""
    made = ((_twice_quantized(row, half.recipe), half) for row, half in zip(rows, columns, strict=True))
    return all(one is not None and torch.equal(one.codes, half.codes) for one, half in made)


def _twice_quantized(row: Quantized, recipe: Recipe) -> Quantized | None:
    """The columnwise half of the decoded values of a rowwise one. None if these values do not determine the half."""
    if recipe.transform or recipe.rounding == "stochastic" or recipe.tensor_scale == "given":
        return None
    return reference.quantize_both(reference.dequantize(row), recipe, rowwise=False)[1]


def _rotated_ends(x: torch.Tensor, half: Half, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest number of each element of a half of `x` (M, K) that is rotated in any order, at the
    places of `x`; infinite if a sum may overflow."""
    ends = rotated_interval(half.matrix(x).contiguous(), recipe)
    low, high = (end.masked_fill(ends.undetermined, torch.inf) for end in (ends.lower, ends.upper))
    return half.matrix(low).contiguous(), half.matrix(high).contiguous()


def _first_rows(q: Quantized, rows: int) -> Quantized:
    """An operand without the rows of padding behind these rows; all rows have scales of their own, or no row has."""
    if q.shape[0] == rows:
        return q
    scales = q.scales if q.recipe.whole else q.scales[:rows]
    return replace(q, codes=q.codes[:rows], scales=scales, shape=(rows, q.shape[1]))


def _freed(limits: Bounds, free: torch.Tensor) -> Bounds:
    """Limits that accept every output where `free` is True."""
    return replace(
        limits, lower=limits.lower.masked_fill(free, -torch.inf), upper=limits.upper.masked_fill(free, torch.inf),
        exact=limits.exact & ~free, undetermined=limits.undetermined | free,
        budget=limits.budget.masked_fill(free, torch.inf),
    )  # fmt: skip


def _cut(limits: Bounds, rows: int) -> Bounds:
    """Those of the first rows."""
    return Bounds(*(getattr(limits, one.name)[:rows] for one in fields(Bounds)))
