"""Delayed scaling of a layer, or of attention: histories and scales, and their changes by a forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from narrowgauge.harness.backends.guarded_memory import dense
from narrowgauge.harness.cases.layers import Layer
from narrowgauge.harness.operations.modules.ground import Ground
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.outcome import CauseSearch
from narrowgauge.harness.operations.update_scale.deviations import wrong_histories, wrong_scales
from narrowgauge.harness.operations.update_scale.judge import history_stage, scale_stage
from narrowgauge.spec.modules.training import TrainingRecipe
from narrowgauge.spec.recipes import Recipe

ATTENTION = "attention."
"""Prefix of the state of quantized attention."""
State = tuple[torch.Tensor, torch.Tensor]
"""Columns of an amax history, float32 (H, n), and their scales, float32 (n,)."""
Amaxes = Sequence[torch.Tensor | None]
"""Amaxes of the sections of each operand, float32 (sections,); None if unknown."""


@dataclass
class Delayed:
    """State of delayed scaling of a layer, or of attention. An unknown part is None."""

    forward: State | None
    """Of operands of the forward: moved at the end of a forward."""
    grad: State | None
    """Of gradients: moved at the end of a backward."""


States = dict[str, Delayed]
"""By the prefix of the layer, or `ATTENTION`."""


def initial_states(training: TrainingRecipe, layers: Sequence[Layer], device: torch.device) -> States:
    """The states of new layers; without delayed scaling none."""

    def new(columns: int) -> State:
        return torch.zeros(training.history, columns, device=device), torch.ones(columns, device=device)

    if not training.history:
        return {}
    states = {layer.prefix: Delayed(new(2), new(1)) for layer in layers}
    return states | ({ATTENTION: Delayed(new(3), new(3))} if training.quantizes_attention else {})


class DelayedStages:
    """The state of a layer, or of attention, in a step. Without delayed scaling its methods do nothing."""

    def __init__(self, ground: Ground, prefix: str, states: States, columns: tuple[int, int]) -> None:
        """`states`: present states, which every end of a forward or backward moves. `columns`: numbers of columns of a
        history, for operands of the forward and for gradients."""
        self.ground, self.prefix, self._columns = ground, prefix, columns
        self.present = states.get(prefix, Delayed(None, None))
        self.at_forward: State | None = None
        """State of the operands of the forward when the forward began."""
        self._forward: State | None = None
        """The right state of these operands after the forward."""
        self._reported_forward: State | None = None
        self._given: dict[int, tuple[torch.Tensor, ...]] = {}
        """Arguments of the updates: 0 of operands of the forward, 1 of gradients."""

    @property
    def _training(self) -> TrainingRecipe:
        return self.ground.plan.training

    def begin(self) -> None:
        """Begin a forward."""
        self.at_forward = self.present.forward

    def scale(self, column: int) -> torch.Tensor | None:
        """Encode scale () of the operand of a column; None if the scale is unknown."""
        forward = self._columns[0]
        state = self.at_forward if column < forward else self.present.grad
        return None if state is None else state[1][column if column < forward else column - forward]

    def end_forward(self, amaxes: Amaxes, *, recorded: bool = False) -> None:
        """Move the state by the amaxes of the operands. Judge the state after a probe, which has no backward.

        `recorded`: a further forward follows in the same autocast: only the amaxes are recorded.
        """
        if not self._training.history:
            return
        if recorded:
            self.present.forward = self._recorded(0, self.at_forward, amaxes)
            return
        before, expected = self.at_forward, self._updated(0, self.at_forward, amaxes, self._training.input)
        self._forward = expected
        found = self._reported_states()
        if self.ground.step.probe:
            if not found or before is None or expected is None:
                self.ground.unseen |= dict.fromkeys(self.prefix + name for name in ("history", "scale"))
                # A module may leave the state alone if no gradient is wanted.
                known = self.ground.plan.use != "no-grad" and not found
                self.present.forward = expected if known else found[-1][0] if found else None
                return
            self.present.forward = found[-1][0]
            kept = self.ground.plan.use == "no-grad" and all(map(torch.equal, found[-1][0], before))
            grad = self.present.grad or found[-1][1]
            self._judge_states(found[-1], Delayed(before if kept else expected, grad), Delayed(before, grad))
            return
        self.present.forward = expected
        if self.ground.plan.pending and len(found) > 1:  # the first report is that of the forward
            self._reported_forward = self.present.forward = found[0][0]

    def share_forward(self, last: DelayedStages) -> None:
        """Take the state after the last forward of the autocast for that after this forward."""
        self._forward, self._reported_forward = last._forward, last._reported_forward
        self._given |= {number: given for number, given in last._given.items() if number == 0}

    def end(self, amaxes: Amaxes) -> None:
        """Move the state by the amaxes of the gradients, and judge history and scales after the step."""
        if not self._training.history:
            return
        before = self.present.grad
        expected = self._updated(1, before, amaxes, self._training.grad)
        found, forward = self._reported_states(), self._forward
        pending = self.ground.plan.pending
        self.present.grad = expected
        if not found or forward is None or expected is None or self.at_forward is None:
            self.ground.unseen |= dict.fromkeys(self.prefix + name for name in ("history", "scale"))
        else:
            last = found[-1]
            if pending:  # other forwards have moved the state of input and weight
                last = self._reported_forward or forward, last[1]
            self._judge_states(last, Delayed(forward, expected), Delayed(self.at_forward, before))
        if found:
            self.present.forward, self.present.grad = found[-1]

    def _reported_states(self) -> list[tuple[State, State]]:
        """The states of input and weight, and of the gradient, each time that the module reported both tensors."""
        ground, prefix, first = self.ground, self.prefix, self._columns[0]
        history = ground.tensors(prefix + "history", (self._training.history, sum(self._columns)))
        scale = ground.tensors(prefix + "scale", (sum(self._columns),))
        if len(history) != len(scale):
            history, scale = history[-1:], scale[-1:]
        return [
            ((one[:, :first], other[:first]), (one[:, first:], other[first:]))
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
                    self.ground.note_causes(self.prefix + name, search)
        for state in (found, (expected.forward, expected.grad), (before.forward, before.grad)):
            columns = [part for part in state if part is not None]
            joined.append((torch.cat([h for h, _ in columns], -1), torch.cat([s for _, s in columns], -1)))
        (history, scale), right, old = joined
        stages = self.ground.outcome.stages
        stages.append(history_stage(self.ground.stage(self.prefix + "history"), history, right[0], old[0]))
        stages.append(scale_stage(self.ground.stage(self.prefix + "scale"), scale, right[1], old))

    def _updated(self, number: int, state: State | None, amaxes: Amaxes, recipe: Recipe) -> State | None:
        """The state after an update, by number, of the amaxes of the module's own operands; None where one is
        unknown."""
        recorded = self._recorded(number, state, amaxes)
        return None if recorded is None else reference.update_scale(*recorded, recipe)

    def _recorded(self, number: int, state: State | None, amaxes: Amaxes) -> State | None:
        """The state with the amaxes of the module's own operands in the first row; None where one is unknown."""
        if state is None or any(of_operand is None for of_operand in amaxes):
            return None
        history, scale = (tensor.clone() for tensor in state)
        of_sections: list[torch.Tensor] = []
        for place, of_operand in enumerate(amaxes):
            assert of_operand is not None
            before = history[0, place].clone()
            history[0, place] = torch.maximum(before, of_operand.amax())
            of_sections.append(torch.maximum(before, of_operand))
        together = torch.stack(of_sections, 1) if len({len(column) for column in of_sections}) == 1 else history[:1]
        self._given[number] = history.clone(), scale.clone(), together
        return history, scale
