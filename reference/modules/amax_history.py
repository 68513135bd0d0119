"""Amax histories of a layer: delayed scaling's state, and the observer that sees it and everything else move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from narrowgauge.reference.modules.float32_buffers import Float32Buffers
from narrowgauge.reference.quantize.delayed import update_scale
from narrowgauge.spec.autocast import at_exit, recomputing, remember
from narrowgauge.spec.module_arguments import check_history_length
from narrowgauge.spec.training import TrainingRecipe

INPUT, WEIGHT, GRAD = 0, 1, 2
"""Columns of a history: of the input, the weight and the gradient of the output."""

Observer = Callable[[str, Any], None]


class AmaxHistory(Float32Buffers):
    """A module with `amax_history`, float32 (H, 3), and `scale`, float32 (3,): of its input, weight and gradient.

    Both are None until the module first runs under delayed scaling, whose recipe has H; they then start as zeros and
    ones, and belong to its state. The largest amax of a step is in the first row; the input's and the weight's scale
    are updated when the autocast ends, the gradient's at the end of the backward.
    """

    amax_history: torch.Tensor | None
    scale: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.observer: Observer | None = None
        self.register_buffer("amax_history", None)
        self.register_buffer("scale", None)
        self._delayed: TrainingRecipe | None = None

    def observe(self, name: str, value: Any) -> None:
        """Tells the observer, if there is one, that `value` was computed.

        Of tensors it gets copies: autograd goes on to add to a gradient that it was given, and an update to a history.
        """
        if self.observer is not None:
            self.observer(name, _copied(value))

    def present_scales(self, recipe: TrainingRecipe, device: torch.device) -> torch.Tensor | None:
        """The scales of a forward that begins now, float32 (3,), or None where the recipe has no history.

        In the second forward of a checkpoint those of the first. Raises ValueError where the module has a history of
        another length.
        """
        if not recipe.history:
            return None
        if self.amax_history is None or self.scale is None:
            self.amax_history = torch.zeros(recipe.history, 3, device=device)
            self.scale = torch.ones(3, device=device)
        check_history_length(type(self).__name__, len(self.amax_history), recipe)
        return remember(self.scale.clone())

    def record(self, column: int, amax: torch.Tensor | None) -> None:
        """Raises this step's amax of one of the three to `amax`, float32 (N,), the largest of which counts."""
        assert self.amax_history is not None
        assert amax is not None  # only recipes of delayed scaling come here, and these find one
        self.amax_history[0, column] = torch.maximum(self.amax_history[0, column], amax.max())

    def record_forward(self, recipe: TrainingRecipe, amaxes: dict[int, torch.Tensor | None]) -> None:
        """Records the amaxes of a forward, by column (None: of nothing), and the autocast's end updates the scales.

        A second forward of a checkpoint saw the same tensors before, so it records nothing.
        """
        if not recipe.history or recomputing():
            return
        for column, amax in amaxes.items():
            if amax is not None:
                self.record(column, amax)
        self._delayed = recipe
        at_exit(self._end_forward)

    def _end_forward(self) -> None:
        assert self._delayed is not None
        self._update(slice(INPUT, GRAD), self._delayed)

    def end_backward(self, recipe: TrainingRecipe) -> None:
        """Updates the scale of the gradient."""
        if recipe.history:
            self._update(slice(GRAD, None), recipe)

    def _update(self, columns: slice, recipe: TrainingRecipe) -> None:
        assert self.amax_history is not None
        assert self.scale is not None
        rule = recipe.grad if columns.start == GRAD else recipe.input
        history, scale = update_scale(self.amax_history[:, columns].contiguous(), self.scale[columns], rule)
        self.amax_history[:, columns] = history
        self.scale[columns] = scale
        self.observe("history", self.amax_history)
        self.observe("scale", self.scale)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_copied(one) for one in value] if isinstance(value, list) else value
