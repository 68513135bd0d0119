"""A mixture of experts: its two grouped layers, and the routing and SwiGLU around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.modules.delayed import States
from narrowgauge.harness.operations.modules.ground import Ground
from narrowgauge.harness.operations.modules.linear import LinearStages
from narrowgauge.harness.operations.stages.oracle import (
    permute,
    swiglu_backward,
    swiglu_forward,
    weight_gradient,
    weighted_rows,
    weighted_sum,
)
from narrowgauge.reference.high_precision.bounded import Bounded, exactly
from narrowgauge.spec.modules.routing import positions_of

Matrix = torch.Tensor | None


class ExpertStages:
    """The stages of a mixture of experts in one step: forward, backward and end.

    Rows of tokens in the order of their experts, fc1, SwiGLU, fc2, the sum over the choices with their probabilities.
    Each stage is given the module's own result of the stages before, as in `LinearStages`. Rows of an expert may have
    any order, if the module reports `source_rows`.
    """

    def __init__(self, ground: Ground, states: States) -> None:
        """`states`: present states of delayed scaling, changed at the end of every forward and backward."""
        self.ground = ground
        self.fc1, self.fc2 = (LinearStages(ground, layer, states) for layer in ground.plan.layers)
        self.ids, self.probabilities = (ground.step.routing[name] for name in ("expert_ids", "probabilities"))
        self.hidden, self.ffn = ground.plan.layers[1].outer, ground.plan.layers[1].inner
        self._saved: dict[str, Matrix] = {}

    def forward(self, x: Matrix) -> Matrix:
        """Judge the forward of `x` (T, hidden); gives y."""
        assert x is not None
        self.source_rows = self._order()
        self.positions = {"positions": positions_of(self.source_rows, *self.ids.shape)}
        rows = self._judged("permuted", self._chosen, (len(self.source_rows), self.hidden), x=x)
        inner = self.fc1.forward(rows)
        activated = self._judged("swiglu", swiglu_forward, (len(self.source_rows), self.ffn), "swiglu", x=inner)
        outer = self.fc2.forward(activated)
        self._saved = {"inner": inner, "outer": outer}
        return self._judged(
            "y", weighted_sum, tuple(x.shape), "choices", self.positions, y=outer, weights=self.probabilities
        )

    def backward(self, dy: Matrix) -> Matrix:
        """Judge the backward of `dy` (T, hidden); gives dx."""
        rows = len(self.source_rows)
        self._judged(
            "dprobabilities", weight_gradient, tuple(self.ids.shape), "weight-gradient", self.positions, torch.float32,
            dy=dy, y=self._saved["outer"],
        )  # fmt: skip
        given = {"source_rows": self.source_rows}
        outer = self._judged(
            "dfc2", weighted_rows, (rows, self.hidden), "choice-rows", given, dy=dy, weights=self.probabilities
        )
        inner = self._judged(
            "dswiglu", swiglu_backward, (rows, 2 * self.ffn), "swiglu-backward", dy=self.fc2.backward(outer),
            x=self._saved["inner"],
        )  # fmt: skip
        permuted = self.fc1.backward(inner)
        if self.ground.plan.use == "frozen-input":
            return None
        return self._judged("dx", weighted_sum, tuple(self.ground.step.x.shape), "choices", self.positions, y=permuted)

    def end_forward(self, *, recorded: bool = False) -> None:
        """`LinearStages.end_forward` of both layers."""
        for layer in (self.fc1, self.fc2):
            layer.end_forward(recorded=recorded)

    def share_forward(self, last: Any) -> None:
        """`LinearStages.share_forward` of both layers. `last`: stages of the same kind."""
        self.fc1.share_forward(last.fc1)
        self.fc2.share_forward(last.fc2)

    def end(self) -> None:
        """Judge the end of the step of both layers."""
        for layer in (self.fc1, self.fc2):
            layer.end()

    def _order(self) -> torch.Tensor:
        """The choices of the rows, reported by the module, or in the order of tokens. Judges that every section has the
        choices of its expert, once."""
        sizes = list(self.ground.plan.sections)
        right = permute(self.ids.new_zeros(len(self.ids), 1), self.ids, experts=len(sizes))[1][: sum(sizes)]
        found = self.ground.tensor("source_rows", (sum(sizes),))
        if found is None:
            return right
        pairs = zip(torch.split(found.long(), sizes), torch.split(right, sizes), strict=True)
        wrong = torch.cat([own.sort()[0] != expected for own, expected in pairs])
        stage = StageResult(self.ground.stage("source_rows"), "exact", len(found), int(wrong.sum()))
        if stage.mismatches:
            stage.sentence = (
                f"{stage.mismatches} of {len(found)} rows are no choices of their expert, or choices of another row"
            )
        self.ground.outcome.stages.append(stage)
        return right if stage.mismatches else found.long()

    def _chosen(self, x: torch.Tensor) -> Bounded:
        return exactly(x[self.source_rows // max(1, self.ids.shape[1])])

    def _judged(
        self, name: str, compute: Callable[..., Bounded], shape: tuple[int, ...], formula: str = "",
        given: Mapping[str, torch.Tensor] | None = None, dtype: torch.dtype | None = None, **operands: Matrix,
    ) -> Matrix:  # fmt: skip
        """Judge a result in high precision: a formula of `operands`, if the module reported all of them.

        `given`: further arguments of the formula. `dtype`: of the result; None: the dtype of the module. `formula`:
        name of the known wrong formulas, with the same arguments.
        """
        given = given or {}
        known: dict[str, Any] = {**operands, **given} if formula else {}
        return self.ground.high_precision(
            name, shape, partial(compute, **given), operands, formula, dtype=dtype, **known
        )
