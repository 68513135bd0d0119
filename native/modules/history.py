"""The amax histories and scales of a layer under delayed scaling, and the observer that sees them move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from narrowgauge.native.modules.float32_buffers import Float32Buffers
from narrowgauge.native.quantize.delayed import update_scale
from narrowgauge.spec.autocast import at_exit, recomputing, remember
from narrowgauge.spec.module_arguments import check_history_length
from narrowgauge.spec.training import TrainingRecipe

Observer = Callable[[str, Any], None]
"""Takes the name of a result and the result: a tensor or a Quantized, or a list of them, one for each group.

It copies what it keeps: autograd adds the next gradient to a parameter's in place.
"""

INPUT, WEIGHT, GRAD = 0, 1, 2
"""Roles of operands: columns of a history and of its scales."""


class History(Float32Buffers):
    """A module with an observer, and with `amax_history`, float32 (H, 3), the latest first, and `scale`, float32 (3,).

    Both are None before the first forward under delayed scaling, and begin as zeros and ones. Input and weight move on
    when the autocast ends, the gradient when the module's own backward does.
    """

    amax_history: torch.Tensor | None
    scale: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.observer: Observer | None = None
        self._delayed: TrainingRecipe | None = None
        self.register_buffer("amax_history", None)
        self.register_buffer("scale", None)

    def report(self, name: str, value: Any) -> None:
        """Tells the observer of a result, if there is one."""
        if self.observer is not None:
            self.observer(name, value.detach() if isinstance(value, torch.Tensor) else value)

    def present_scales(self, recipe: TrainingRecipe, device: torch.device) -> torch.Tensor:
        """The scales of a pass that begins, float32 (3,); in a checkpoint's second forward those of its first.

        Raises ValueError where the history has another length than the recipe's.
        """
        if self.amax_history is None or self.scale is None:
            self.amax_history = torch.zeros(recipe.history, 3, dtype=torch.float32, device=device)
            self.scale = torch.ones(3, dtype=torch.float32, device=device)
        check_history_length(type(self).__name__, len(self.amax_history), recipe)
        return remember(self.scale.clone())

    def scale_of(self, role: int, scales: torch.Tensor | None) -> torch.Tensor | None:
        """The encode scale of an operand, float32 (1,), of the scales of its pass; of a gradient the present one."""
        if scales is None:
            return None
        if role == GRAD:
            assert self.scale is not None
            scales = self.scale
        return scales[role : role + 1]

    def record(self, role: int, amax: torch.Tensor) -> None:
        """Notes the amax, float32 (1,), of what was quantized."""
        # A second forward quantizes what the first one did, and its scale may have moved on since.
        if role != GRAD and recomputing():
            return
        assert self.amax_history is not None
        latest = self.amax_history[0, role : role + 1]
        torch.maximum(latest, amax, out=latest)

    def end_forward_later(self, recipe: TrainingRecipe) -> None:
        """Has the scales of input and weight moved on at the end of the autocast."""
        if not recomputing():
            self._delayed = recipe
            at_exit(self._end_forward)

    def end_backward(self, recipe: TrainingRecipe) -> None:
        """Moves the scale of the gradient on."""
        self._move(slice(GRAD, GRAD + 1), recipe)

    def _end_forward(self) -> None:
        assert self._delayed is not None
        self._move(slice(INPUT, GRAD), self._delayed)

    def _move(self, roles: slice, recipe: TrainingRecipe) -> None:
        assert self.amax_history is not None
        assert self.scale is not None
        history, scale = self.amax_history[:, roles], self.scale[roles]
        moved = update_scale(history, scale, recipe.grad if roles.start == GRAD else recipe.input)
        with torch.no_grad():  # in place, so that whoever holds the buffers goes on seeing them
            history.copy_(moved[0])
            scale.copy_(moved[1])
        if self.observer is not None:
            self.report("history", self.amax_history.clone())
            self.report("scale", self.scale.clone())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        # The first forward under delayed scaling makes the buffers, so a fresh module has no room for them yet.
        for name in ("amax_history", "scale"):
            value = state_dict.get(prefix + name)
            if value is not None:
                device = next((tensor.device for tensor in (*self.parameters(), *self.buffers())), None)
                setattr(self, name, torch.empty_like(value, device=device))
        super()._load_from_state_dict(state_dict, prefix, *arguments)
