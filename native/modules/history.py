"""Float32 buffers of a module, amax history and scales of a layer under delayed scaling, and the observer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from narrowgauge.native.quantize.delayed import update_scale
from narrowgauge.spec.modules.arguments import check_history_length
from narrowgauge.spec.modules.autocast import at_exit, recomputing, remember
from narrowgauge.spec.modules.training import TrainingRecipe

Observer = Callable[[str, Any], None]
"""Takes the name and the value of a result: a tensor, a Quantized, or a list with an entry for each group.

An observer copies values that outlive the call: autograd adds the next gradient of a parameter in place.
"""

INPUT, WEIGHT, GRAD = 0, 1, 2
"""Roles of operands: columns of the history and of the scales."""


class Float32Buffers(torch.nn.Module):
    """`module.bfloat16()` and `module.to(dtype)` convert parameters; scales and amaxes only change the device.

    A scale rounded to bfloat16 has a different value, and no kernel accepts the dtype.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return applied


class History(Float32Buffers):
    """A module with an observer, and with `amax_history`, float32 (H, 3), latest first, and `scale`, float32 (3,).

    A subclass may have another number of `roles`, of which those from `gradients` on are gradients.

    Both buffers are None before the first forward pass under delayed scaling, and start as zeros and ones. The scales
    of input and weight are updated at the end of the autocast, the scale of the gradient at the end of the backward
    pass.
    """

    roles: ClassVar[int] = 3
    gradients: ClassVar[int] = GRAD
    amax_history: torch.Tensor | None
    scale: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.observer: Observer | None = None
        self._delayed: TrainingRecipe | None = None
        self.register_buffer("amax_history", None)
        self.register_buffer("scale", None)

    def report(self, name: str, value: Any) -> None:
        """Passes a result to the observer."""
        if self.observer is not None:
            self.observer(name, value.detach() if isinstance(value, torch.Tensor) else value)

    def present_scales(self, recipe: TrainingRecipe, device: torch.device) -> torch.Tensor:
        """Scales of a new pass, float32 (3,). The second forward pass of a checkpoint gets the scales of the first.

        Raises ValueError if the length of the history differs from the recipe's.
        """
        if self.amax_history is None or self.scale is None:
            self.amax_history = torch.zeros(recipe.history, self.roles, dtype=torch.float32, device=device)
            self.scale = torch.ones(self.roles, dtype=torch.float32, device=device)
        check_history_length(type(self).__name__, len(self.amax_history), recipe)
        return remember(self.scale.clone())

    def _history_and_scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`amax_history` and `scale`. Raises RuntimeError before `present_scales` has created the buffers."""
        if self.amax_history is None or self.scale is None:
            raise RuntimeError(f"{type(self).__name__} has no amax history before a forward pass under delayed scaling")
        return self.amax_history, self.scale

    def scale_of(self, role: int, scales: torch.Tensor | None) -> torch.Tensor | None:
        """Encode scale of an operand, float32 (1,): from the scales of its pass, for a gradient the current scale."""
        if scales is None:
            return None
        if role >= self.gradients:
            _, scales = self._history_and_scale()
        return scales[role : role + 1]

    def record(self, role: int, amax: torch.Tensor) -> None:
        """Adds the amax, float32 (1,), of a quantized operand to the latest entry of the history."""
        # The second forward pass of a checkpoint quantizes the same operands; the scale may have been updated in
        # between.
        if role < self.gradients and recomputing():
            return
        amax_history, _ = self._history_and_scale()
        latest = amax_history[0, role : role + 1]
        torch.maximum(latest, amax, out=latest)

    def end_forward_later(self, recipe: TrainingRecipe) -> None:
        """Schedules the update of the scales of input and weight for the end of the autocast."""
        if not recomputing():
            self._delayed = recipe
            at_exit(self._end_forward)

    def end_backward(self, recipe: TrainingRecipe) -> None:
        """Updates the scale of the gradient."""
        self._move(slice(self.gradients, self.roles), recipe)

    def _end_forward(self) -> None:
        assert self._delayed is not None
        self._move(slice(0, self.gradients), self._delayed)

    def _move(self, roles: slice, recipe: TrainingRecipe) -> None:
        amax_history, scales = self._history_and_scale()
        history, scale = amax_history[:, roles], scales[roles]
        moved = update_scale(history, scale, recipe.grad if roles.start == self.gradients else recipe.input)
        with torch.no_grad():  # in place: references to the buffers stay valid
            history.copy_(moved[0])
            scale.copy_(moved[1])
        if self.observer is not None:
            self.report("history", amax_history.clone())
            self.report("scale", scales.clone())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        # The first forward pass under delayed scaling creates the buffers, so a new module has no buffers to load into.
        for name in ("amax_history", "scale"):
            value = state_dict.get(prefix + name)
            if value is not None:
                device = next((tensor.device for tensor in (*self.parameters(), *self.buffers())), None)
                setattr(self, name, torch.empty_like(value, device=device))
        super()._load_from_state_dict(state_dict, prefix, *arguments)
