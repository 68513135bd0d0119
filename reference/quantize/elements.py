"""Rounding of scaled elements to codes."""

from __future__ import annotations

import torch

from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.numbers.rounding import nearest_e2m1_within, stochastic, wrapping_e2m1
from narrowgauge.spec.recipes import Recipe


def element_codes(scaled: torch.Tensor, recipe: Recipe, random: torch.Tensor | None = None) -> torch.Tensor:
    """Step 7, rounding: codes, uint8 (M, K), of the float32 results of `scale_elements`.

    `random`: a random byte for each element, uint8 (M, K), for stochastic rounding. Source: docs/numerics.md#nvfp4,
    step 7; docs/numerics.md#stochastic-rounding; docs/dialects.md#the-choices.
    """
    return special_codes_(rounded_codes(scaled, recipe, random), scaled, recipe)


def rounded_codes(scaled: torch.Tensor, recipe: Recipe, random: torch.Tensor | None = None) -> torch.Tensor:
    """Codes by the rounding of `recipe` alone. Those that `special_codes_` chooses are arbitrary here."""
    if random is not None:
        return encode(stochastic(scaled, recipe.element, random), recipe.element)
    if recipe.rounding in ("nearest-toward-zero", "nearest-away"):
        return encode(scaled, recipe.element, ties="zero" if recipe.rounding == "nearest-toward-zero" else "away")
    if recipe.rounding == "nearest-even-within-1e-6":
        return nearest_e2m1_within(scaled)
    if recipe.rounding == "nearest-even-wrapping":
        return wrapping_e2m1(scaled)
    return encode(scaled, recipe.element)


def special_codes_(codes: torch.Tensor, scaled: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """`codes` with the codes that `recipe` chooses for zeros and NaN, in place."""
    if recipe.rounding == "nearest-even-wrapping":
        codes.masked_fill_(scaled.isinf(), recipe.nan_code)
    if recipe.negative_zero == "rounded":
        codes.masked_fill_(scaled == 0, 0)
    elif recipe.negative_zero == "never" and recipe.element.negative_zero:
        codes.masked_fill_(codes == recipe.element.sign_code, 0)
    encoded_nan = recipe.element.max_code if recipe.element.nan_code is None else recipe.element.nan_code
    if recipe.nan_code != encoded_nan or recipe.rounding.startswith("nearest-even-"):
        codes.masked_fill_(scaled.isnan(), recipe.nan_code)
    return codes
