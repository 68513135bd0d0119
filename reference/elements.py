"""Scaled elements to codes of E2M1, by the rounding that a recipe names."""

from __future__ import annotations

import torch

from reference.encode import encode
from reference.recipes import Recipe
from reference.rounding import nearest_e2m1_within, stochastic_e2m1, wrapping_e2m1


def element_codes(scaled: torch.Tensor, recipe: Recipe, random: torch.Tensor | None = None) -> torch.Tensor:
    """Codes (uint8) of what `scale_elements` gave, float32; `random`: a byte (uint8) each, for stochastic rounding."""
    if random is not None:
        codes = encode(stochastic_e2m1(scaled, random), recipe.element)
    elif recipe.rounding == "nearest-toward-zero":
        codes = encode(scaled, recipe.element, ties="zero")
    elif recipe.rounding == "nearest-even-within-1e-6":
        codes = nearest_e2m1_within(scaled)
    elif recipe.rounding == "nearest-even-wrapping":
        codes = wrapping_e2m1(scaled).masked_fill_(scaled.isinf(), recipe.nan_code)
    else:
        codes = encode(scaled, recipe.element)
    if recipe.negative_zero == "rounded":
        codes.masked_fill_(scaled == 0, 0)
    elif recipe.negative_zero == "never":
        codes.masked_fill_(codes == recipe.element.sign_code, 0)
    if recipe.nan_code != recipe.element.max_code or recipe.rounding.startswith("nearest-even-"):
        codes.masked_fill_(scaled.isnan(), recipe.nan_code)  # of the other roundings it is the largest code already
    return codes
