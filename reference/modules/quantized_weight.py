"""A weight that is held quantized: codes and scales of both its halves, as buffers."""

from __future__ import annotations

import torch

from narrowgauge.reference.modules.float32_buffers import Float32Buffers
from narrowgauge.spec.module_arguments import check_written
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.training import TrainingRecipe, training_recipe

_HALVES = ("rowwise", "columnwise")
_PARTS = ("codes", "scales", "amax", "tensor_scale")


class QuantizedWeight(Float32Buffers):
    """Both halves of a weight (N, K), and the training recipe that they were quantized by; nothing before `write`.

    Buffers: rowwise_codes, rowwise_scales, rowwise_amax and so on, as in `Quantized`; None where the recipe has none.
    """

    place: torch.Tensor
    """Without elements: where the module is."""

    def __init__(self, shape: tuple[int, int], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.recipe: TrainingRecipe | None = None
        self.register_buffer("place", torch.empty(0, device=device), persistent=False)
        for half in _HALVES:
            for part in _PARTS:
                self.register_buffer(f"{half}_{part}", None)

    def write(self, rowwise: Quantized, columnwise: Quantized, recipe: TrainingRecipe) -> None:
        """Holds these halves from now on; those from before stay what they are for a backward that still needs them."""
        for half, q in zip(_HALVES, (rowwise, columnwise), strict=True):
            for part in _PARTS:
                setattr(self, f"{half}_{part}", getattr(q, part))
        self.recipe = recipe

    def read(self, recipe: TrainingRecipe | None) -> tuple[Quantized, Quantized]:
        """The rowwise and the columnwise half.

        Raises RuntimeError where nothing was written yet, ValueError where that was under another recipe.
        """
        written = check_written(self.shape, self.recipe, recipe)
        row, column = (self._half(half, written) for half in _HALVES)
        return row, column

    def _half(self, half: str, recipe: TrainingRecipe) -> Quantized:
        parts = {part: getattr(self, f"{half}_{part}") for part in _PARTS}
        columnwise = half == "columnwise"
        rule = recipe.weight if columnwise else recipe.weight.rowwise
        return Quantized(
            parts["codes"], parts["scales"], parts["amax"], rule, self.shape[::-1] if columnwise else self.shape,
            parts["tensor_scale"], transposed=columnwise and rule.columnwise == "in-place",
        )  # fmt: skip

    def get_extra_state(self) -> str | None:
        """The recipe's name, beside the buffers in a state dict."""
        return None if self.recipe is None else str(self.recipe)

    def set_extra_state(self, state: str | None) -> None:
        """Takes the recipe from a state dict."""
        self.recipe = None if state is None else training_recipe(state)
