"""Amax histories and scales of a layer, the state of delayed scaling, and the observer of the results of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from narrowgauge.reference.modules.float32_buffers import Float32Buffers
from narrowgauge.reference.quantize.delayed import update_scale
from narrowgauge.spec.modules.arguments import check_history_length
from narrowgauge.spec.modules.autocast import at_exit, recomputing, remember
from narrowgauge.spec.modules.training import TrainingRecipe

INPUT, WEIGHT, GRAD = 0, 1, 2
"""Columns of a history: of the input, the weight and the gradient of the output."""

Observer = Callable[[str, Any], None]
"""Called with the name and the value of every result of a layer."""


class AmaxHistory(Float32Buffers):
    """A module with `amax_history`, float32 (H, 3), and `scale`, float32 (3,), for its input, weight and gradient.

    A subclass may have other numbers of columns: `columns`, of which the last are gradients, from `gradients` on.

    Both are None until the module first runs under delayed scaling, with H from the recipe. Then they start as zeros
    and ones, and belong to the state of the module. The first row of the history is the largest amax of the step. The
    scales of input and weight are updated when the autocast ends, the scale of the gradient at the end of the backward.
    """

    columns: ClassVar[int] = 3
    gradients: ClassVar[int] = GRAD
    amax_history: torch.Tensor | None
    scale: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.observer: Observer | None = None
        self.register_buffer("amax_history", None)
        self.register_buffer("scale", None)
        self._delayed: TrainingRecipe | None = None

    def observe(self, name: str, value: Any) -> None:
        """Calls the observer, if set, with a computed `value`.

        The observer receives copies of tensors: autograd later adds to the gradients of a module, and an update
        overwrites a history.
        """
        if self.observer is not None:
            self.observer(name, _copied(value))

    def present_scales(self, recipe: TrainingRecipe, device: torch.device) -> torch.Tensor | None:
        """The scales at the start of a forward, float32 (3,), or None for a recipe without a history.

        The second forward of a checkpoint gets the scales of the first forward. Raises ValueError if the history of the
        module has another length than the recipe names.
        """
        if not recipe.history:
            return None
        if self.amax_history is None or self.scale is None:
            self.amax_history = torch.zeros(recipe.history, self.columns, device=device)
            self.scale = torch.ones(self.columns, device=device)
        check_history_length(type(self).__name__, len(self.amax_history), recipe)
        return remember(self.scale.clone())

    def delayed_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`amax_history` and `scale`. Raises RuntimeError before the first forward under delayed scaling."""
        if self.amax_history is None or self.scale is None:
            raise RuntimeError(f"{type(self).__name__} has no amax history before a forward under delayed scaling")
        return self.amax_history, self.scale

    def record(self, column: int, amax: torch.Tensor) -> None:
        """Raises the amax of this step in a column of the history to the largest of `amax`, float32 (N,)."""
        history, _ = self.delayed_state()
        history[0, column] = torch.maximum(history[0, column], amax.max())

    def record_forward(self, recipe: TrainingRecipe, amaxes: dict[int, torch.Tensor | None]) -> None:
        """Records the amaxes of a forward by column, except None, and updates the scales when the autocast ends.

        The second forward of a checkpoint records no amaxes, because the first forward recorded the same tensors.
        """
        if not recipe.history or recomputing():
            return
        for column, amax in amaxes.items():
            if amax is not None:
                self.record(column, amax)
        self._delayed = recipe
        at_exit(self._end_forward)

    def _end_forward(self) -> None:
        if self._delayed is not None:
            self._update(slice(0, self.gradients), self._delayed)

    def end_backward(self, recipe: TrainingRecipe) -> None:
        """Updates the scale of the gradient under delayed scaling."""
        if recipe.history:
            self._update(slice(self.gradients, None), recipe)

    def _update(self, columns: slice, recipe: TrainingRecipe) -> None:
        history, scale = self.delayed_state()
        role_recipe = recipe.grad if columns.start == self.gradients else recipe.input
        history[:, columns], scale[columns] = update_scale(
            history[:, columns].contiguous(), scale[columns], role_recipe
        )
        self.observe("history", history)
        self.observe("scale", scale)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_copied(item) for item in value] if isinstance(value, list) else value
