"""A quantized weight: codes and scales of both halves, as buffers."""

from __future__ import annotations

import torch

from narrowgauge.reference.modules.float32_buffers import Float32Buffers
from narrowgauge.spec.modules.arguments import check_written
from narrowgauge.spec.modules.training import TrainingRecipe, training_recipe
from narrowgauge.spec.quantized import PARTS, Half, Quantized


class QuantizedWeight(Float32Buffers):
    """Both halves of a weight (N, K) and their training recipe; empty before `write`.

    Buffers: rowwise_codes, rowwise_scales, rowwise_amax and so on, as in `Quantized`; None if the recipe has no such
    part.
    """

    place: torch.Tensor
    """Tensor without elements, on the device of the module."""

    def __init__(self, shape: tuple[int, int], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.recipe: TrainingRecipe | None = None
        self.register_buffer("place", torch.empty(0, device=device), persistent=False)
        for half in Half:
            for part in PARTS:
                self.register_buffer(f"{half}_{part}", None)

    def write(self, rowwise: Quantized, columnwise: Quantized, recipe: TrainingRecipe) -> None:
        """Stores new halves. The tensors of the former halves are unchanged: a pending backward may need them."""
        for half, q in zip(Half, (rowwise, columnwise), strict=True):
            for part in PARTS:
                setattr(self, f"{half}_{part}", getattr(q, part))
        self.recipe = recipe

    def read(self, recipe: TrainingRecipe | None) -> tuple[Quantized, Quantized]:
        """The rowwise and the columnwise half.

        Raises RuntimeError before the first `write`, ValueError if the last `write` had another recipe.
        """
        written = check_written(self.shape, self.recipe, recipe)
        row, column = (self._half(half, written) for half in Half)
        return row, column

    def _half(self, half: Half, recipe: TrainingRecipe) -> Quantized:
        parts = {part: getattr(self, f"{half}_{part}") for part in PARTS}
        weight, transposed = half.recipe(recipe.weight), half.transposed(recipe.weight)
        return Quantized(**parts, recipe=weight, shape=half.shape(self.shape), transposed=transposed)

    def get_extra_state(self) -> str | None:
        """The name of the recipe, stored beside the buffers in a state dict."""
        return None if self.recipe is None else str(self.recipe)

    def set_extra_state(self, state: str | None) -> None:
        """Restores the recipe from a state dict."""
        self.recipe = None if state is None else training_recipe(state)
