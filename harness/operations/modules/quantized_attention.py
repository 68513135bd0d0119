"""Stages of attention with quantized operands (`TrainingRecipe.quantizes_attention`), forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.results import as_quantized
from narrowgauge.harness.operations.modules.delayed import ATTENTION, DelayedStages, States
from narrowgauge.harness.operations.modules.ground import Ground
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.outcome import QuantizedOperand
from narrowgauge.harness.operations.stages.quantized import Subject, quantize_stages
from narrowgauge.reference.high_precision.bounded import Bounded, exactly
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

Matrix = torch.Tensor | None
SQUARE = ("softmax", "s", "dscores", "dp")
"""Matrices (B·heads·S, S). The others are (B·S, heads·d)."""
OPERANDS = ("qkv", "s", "o", "do", "dp", "dqkv")
"""Quantized tensors in the order of the columns of a history; the last three are gradients."""
GRADIENTS = OPERANDS.index("do")


class QuantizedAttentionStages:
    """The operands qkv, s and o of the forward, do, dp and dqkv of the backward, and the steps between them.

    A step is given the module's own operands. A kernel may decode the operands in float32 or to the dtype of the layer:
    the interval contains both results. An operand that was not reported is the reference's, if the module reported the
    matrix that is quantized.
    """

    def __init__(self, ground: Ground, heads: int, states: States) -> None:
        """`states`: as of `DelayedStages`."""
        self.ground, self.heads = ground, heads
        self.delayed = DelayedStages(ground, ATTENTION, states, (GRADIENTS, len(OPERANDS) - GRADIENTS))
        self._amaxes: dict[str, torch.Tensor | None] = {}
        self.batch, self.length, self.hidden = ground.step.x.shape
        self._values: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """Operands of the steps, decoded in float32 and to the dtype of the layer."""
        self._reported: dict[str, Matrix] = {}
        """Results of the steps."""

    def forward(self, qkv: Matrix) -> Matrix:
        """Judge the attention of `qkv` (B·S, 3·hidden); gives its decoded output (B·S, hidden)."""
        recipe = self.ground.plan.training.input
        self.delayed.begin()
        self._operand("qkv", qkv, recipe, ("q", "k", "v"))
        softmax = self._step("softmax", reference.softmax, ("q", "k"), "softmax")
        self._operand("s", softmax, recipe)
        out = self._step("attention", reference.weighted_values, ("s", "v"))
        if softmax is not None:
            self._values["softmax"] = softmax, softmax
        return self._operand("o", out, recipe)

    def backward(self, dy: Matrix) -> Matrix:
        """Judge the gradient for `dy` (B·S, hidden); gives the decoded gradient of qkv (B·S, 3·hidden)."""
        recipe, out = self.ground.plan.training.grad, self._reported["attention"]
        self._operand("do", dy, recipe)
        gradient = partial(reference.scores_gradient, dtype=self.ground.plan.dtype)
        dscores = self._step(
            "dscores", gradient, ("do", "v", "softmax"), "scores-gradient",
            out=None if out is None else self._heads_of("o", out),
        )  # fmt: skip
        self._operand("dp", dscores, recipe)
        dqkv = self.ground.tensor("dqkv", self._shape("qkv"))
        for name, part in zip(("dq", "dk", "dv"), (None,) * 3 if dqkv is None else dqkv.chunk(3, 1), strict=True):
            self._reported[name] = None if part is None else part.contiguous()
        root = math.sqrt(self.hidden // self.heads)
        self._judge("dq", reference.query_gradient, ("dp", "k"), "scaled-gradient", root=root)
        self._judge("dk", reference.key_gradient, ("dp", "q"), "scaled-gradient", root=root)
        self._judge("dv", reference.value_gradient, ("s", "do"))
        return self._operand("dqkv", dqkv, recipe)

    def end_forward(self, *, recorded: bool = False) -> None:
        """`DelayedStages.end_forward`."""
        self.delayed.end_forward([self._amaxes[name] for name in OPERANDS[:GRADIENTS]], recorded=recorded)

    def share_forward(self, last: QuantizedAttentionStages) -> None:
        """`DelayedStages.share_forward`."""
        self.delayed.share_forward(last.delayed)

    def end(self) -> None:
        """`DelayedStages.end`."""
        self.delayed.end([self._amaxes[name] for name in OPERANDS[GRADIENTS:]])

    def _shape(self, name: str) -> tuple[int, int]:
        rows = self.batch * self.length
        if name in SQUARE:
            return rows * self.heads, self.length
        return rows, self.hidden * (3 if name.endswith("qkv") else 1)

    def _operand(self, name: str, matrix: Matrix, recipe: Recipe, parts: tuple[str, ...] = ()) -> Matrix:
        """Judge an operand, and give its values in the dtype of the layer. `parts`: names of its columns, in order."""
        q = self._quantized(name, matrix, recipe)
        self._amaxes[name] = None if q is None else q.amax
        if q is None:
            return None
        names = parts or (name,)
        exact, stored = (reference.dequantize(q, dtype=d) for d in (torch.float32, self.ground.plan.dtype))
        for number, part in enumerate(names):
            one, other, before = (
                None if values is None else values.chunk(len(names), 1)[number].contiguous()
                for values in (exact, stored, matrix)
            )
            assert one is not None
            assert other is not None
            self._values[part] = one, other
            self.ground.quantized[part] = QuantizedOperand(float(q.scales), before)
            self.ground.known[f"the decoded {part}"] = other.contiguous
        return stored

    def _quantized(self, name: str, matrix: Matrix, recipe: Recipe) -> Quantized | None:
        """An operand as the module reported it, its stages judged, or the reference's. None if neither is known."""
        ground, key = self.ground, ATTENTION + name
        found, scale, oracle = ground.seen(key), None, None
        if ground.plan.training.history:
            scale = self.delayed.scale(OPERANDS.index(name))
        if matrix is not None and (scale is not None or not ground.plan.training.history):
            oracle = reference.quantize(matrix, recipe, scale=None if scale is None else scale.view(1))
        if found is None:
            return oracle
        like = ground.step.x.new_empty(0)
        kernel = as_quantized(found, like, recipe, shape=self._shape(name), method=f"the reported {key}")
        if matrix is None or oracle is None:
            ground.unseen[key] = None
            return kernel
        stages, judged = quantize_stages(Subject(matrix, recipe), kernel, oracle, ground.stage(key) + ".")
        ground.note_origin(key, found, stages)
        ground.outcome.stages += stages
        ground.outcome.judged.append(judged)
        return judged.kernel

    def _step(self, name: str, *formula: Any, **given: Any) -> Matrix:
        """Judge the reported result of a step, and give it. Arguments as of `_judge`."""
        self._reported[name] = self.ground.tensor(name, self._shape(name))
        self._judge(name, *formula, **given)
        return self._reported[name]

    def _judge(
        self, name: str, formula: Callable[..., Bounded], operands: tuple[str, ...], wrong: str = "", **given: Any
    ) -> None:
        """Judge a reported result. `wrong`: name of the table of wrong formulas, which are `given` more arguments."""
        found = self._reported[name]
        if found is None or any(operand not in self._values for operand in operands):
            self.ground.unseen[name] = None
            return

        def compute(roundings: int = 0, **values: torch.Tensor) -> Bounded:
            result = formula(*(exactly(self._heads_of(n, values[n])).with_roundings(roundings) for n in operands))
            return Bounded(self._joined(name, result.value), self._joined(name, result.error), result.assumes)

        # A kernel that decodes in float32 may multiply the result by the scales instead of the operands.
        exact, stored = ({operand: self._values[operand][form] for operand in operands} for form in (0, 1))
        right = compute(1, **exact)
        expected = right.hull(lambda: compute(0, **stored)).assuming(right.assumes)
        of_heads = {operand: self._heads_of(operand, value) for operand, value in stored.items()}
        self.ground.judge_formula(
            name, found, expected, compute, stored, wrong, {"operands": of_heads, "expected": expected, **given}
        )

    def _heads_of(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """A matrix as (B, heads, S, d) or (B, heads, S, S)."""
        if name in SQUARE:
            return matrix.view(self.batch, self.heads, self.length, self.length)
        return matrix.view(self.batch, self.length, self.heads, -1).transpose(1, 2)

    def _joined(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The matrix of (B, heads, S, d) or (B, heads, S, S)."""
        return (x if name in SQUARE else x.transpose(1, 2)).reshape(self._shape(name))
