"""A quantized weight: codes and scales of both halves, without the unquantized weight."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.native.modules.history import Float32Buffers
from narrowgauge.spec.modules.arguments import check_written
from narrowgauge.spec.modules.training import TrainingRecipe, training_recipe
from narrowgauge.spec.quantized import PARTS, Half, Quantized


class QuantizedWeight(Float32Buffers):
    """Both halves of a weight (N, K), quantized under a training recipe, with a complete state dict.

    Buffers are `rowwise_codes`, `rowwise_scales` and so on; the extra state is the recipe's name.
    """

    place: torch.Tensor
    """Tensor without elements on the device to which a state dict is loaded."""

    def __init__(self, shape: tuple[int, int], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.recipe: TrainingRecipe | None = None
        self.register_buffer("place", torch.empty(0, device=device), persistent=False)
        for half in Half:
            for part in PARTS:
                self.register_buffer(f"{half}_{part}", None)

    def hold(self, rows: Quantized, columns: Quantized, recipe: TrainingRecipe) -> None:
        """Replaces the halves by `rows` and `columns`, quantized under `recipe`."""
        for half, q in zip(Half, (rows, columns), strict=True):
            for part in PARTS:
                setattr(self, f"{half}_{part}", getattr(q, part))
        self.recipe = recipe

    def halves(self, recipe: TrainingRecipe | None) -> tuple[Quantized, Quantized]:
        """The halves, rowwise (N, K) and columnwise (K, N), for a pass under `recipe`.

        Raises ValueError if the weight was written under a different recipe, RuntimeError if no weight was written.
        """
        written = check_written(self.shape, self.recipe, recipe)
        rows, columns = (
            Quantized(
                **{part: getattr(self, f"{half}_{part}") for part in PARTS},
                recipe=half.recipe(written.weight),
                shape=half.shape(self.shape),
                transposed=half.transposed(written.weight),
            )
            for half in Half
        )
        return rows, columns

    def get_extra_state(self) -> str | None:
        """Name of the recipe; None before the first write."""
        return None if self.recipe is None else str(self.recipe)

    def set_extra_state(self, state: str | None) -> None:
        """Restores the recipe from its name."""
        self.recipe = None if state is None else training_recipe(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        # The shapes depend on the recipe, so a new weight has no buffers to load into.
        for half in Half:
            for part in PARTS:
                value = state_dict.get(f"{prefix}{half}_{part}")
                room = None if value is None else torch.empty_like(value, device=self.place.device)
                setattr(self, f"{half}_{part}", room)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
