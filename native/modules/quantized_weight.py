"""A weight that is held quantized: codes and scales of both halves, without the numbers that they were made of."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.native.modules.float32_buffers import Float32Buffers
from narrowgauge.spec.module_arguments import check_written
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.training import TrainingRecipe, training_recipe

_PARTS = ("codes", "scales", "amax", "tensor_scale")
_HALVES = ("rowwise", "columnwise")


class QuantizedWeight(Float32Buffers):
    """Both halves of a weight (N, K), quantized under a training recipe; all of it is in the state dict.

    Buffers are `rowwise_codes`, `rowwise_scales` and so on; the extra state is the recipe's name.
    """

    place: torch.Tensor
    """Without elements: where a state dict is loaded to."""

    def __init__(self, shape: tuple[int, int], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.recipe: TrainingRecipe | None = None
        self.register_buffer("place", torch.empty(0, device=device), persistent=False)
        for half in _HALVES:
            for part in _PARTS:
                self.register_buffer(f"{half}_{part}", None)

    def hold(self, rows: Quantized, columns: Quantized, recipe: TrainingRecipe) -> None:
        """Holds these halves, quantized under `recipe`."""
        for half, q in zip(_HALVES, (rows, columns), strict=True):
            for part in _PARTS:
                setattr(self, f"{half}_{part}", getattr(q, part))
        self.recipe = recipe

    def halves(self, recipe: TrainingRecipe | None) -> tuple[Quantized, Quantized]:
        """The halves, rowwise (N, K) and columnwise (K, N), for a pass of the recipe that they were written under.

        Raises ValueError where it is another, RuntimeError where nothing was written.
        """
        written = check_written(self.shape, self.recipe, recipe)
        r = written.weight
        rows, columns = ({part: getattr(self, f"{half}_{part}") for part in _PARTS} for half in _HALVES)
        return (
            Quantized(**rows, recipe=r.rowwise, shape=self.shape),
            Quantized(**columns, recipe=r, shape=self.shape[::-1], transposed=r.columnwise == "in-place"),
        )

    def get_extra_state(self) -> str | None:
        """The recipe's name; None where nothing was written."""
        return None if self.recipe is None else str(self.recipe)

    def set_extra_state(self, state: str | None) -> None:
        """Takes what `get_extra_state` gave."""
        self.recipe = None if state is None else training_recipe(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        # What shapes they have depends on the recipe, so a fresh weight has no room for them yet.
        for half in _HALVES:
            for part in _PARTS:
                value = state_dict.get(f"{prefix}{half}_{part}")
                room = None if value is None else torch.empty_like(value, device=self.place.device)
                setattr(self, f"{half}_{part}", room)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
