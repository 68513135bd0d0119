"""Odds: between which codes stochastic rounding chooses, and how often it takes the upper one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.interval import power_of_two
from narrowgauge.reference.quantize.elements import element_codes
from narrowgauge.spec.recipes import Recipe

UNKNOWN = -1


@dataclass
class Odds:
    """Of every element of (M, K)."""

    below: torch.Tensor
    """uint8: the code of the grid point at or below the magnitude, without its sign; that of a NaN."""
    least: torch.Tensor
    greatest: torch.Tensor
    """int64: the right codes lie between these, in the order of `ordinal.signed_codes`."""
    chance: torch.Tensor
    """int16: of how many of the 256 values of a random byte the magnitude goes up, ⌊256·f⌋ with f the distance to the
    grid point below in steps; UNKNOWN where nothing is random, or the value is not known."""

    def outside(self, codes: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        """int64 (…, M, K): by how many steps codes (uint8, one an element) are none of the right ones; 0 of those."""
        at = ordinal.signed_codes(codes, recipe.element)
        return torch.maximum(self.least - at, at - self.greatest).clamp_(min=0)

    def up(self, codes: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        """bool: which magnitudes went up."""
        return codes & (recipe.element.sign_code - 1) != self.below


def odds_of(lower: torch.Tensor, upper: torch.Tensor, recipe: Recipe) -> Odds:
    """The odds of scaled values (M, K), float32, that are known to lie from `lower` to `upper`: one tensor where known.

    Source: docs/numerics.md#stochastic-rounding: with t = fl(|v| + u·step) cut down to the grid. That sum rounds, and
    may reach the grid point above one byte earlier than |v| + u·step itself does; a rule that compares bits does not.
    Both are right, and where they differ the chance is UNKNOWN. So it is where `lower` is not `upper`.
    """
    below, low, high, chance = _one(lower, recipe)
    if upper is lower:
        least, greatest = torch.minimum(low, high), torch.maximum(low, high)
        return Odds(below, least, greatest, chance)
    _, other_low, other_high, _ = _one(upper, recipe)
    known = (lower == upper) & (lower.signbit() == upper.signbit())
    return Odds(
        below, torch.minimum(low, high), torch.maximum(other_low, other_high), torch.where(known, chance, UNKNOWN)
    )


def _one(scaled: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Code below, without its sign; both codes as ordinals; chance."""
    fmt = recipe.element
    code = element_codes(scaled, recipe, torch.zeros_like(scaled, dtype=torch.uint8))
    magnitude = scaled.abs().double()
    exponent = torch.frexp(magnitude.clamp(min=2.0 ** (1 - fmt.bias), max=fmt.max)).exponent - 1
    step = power_of_two(exponent - fmt.mantissa_bits)
    steps = magnitude / step
    whole = steps.floor()
    fraction = steps - whole
    moves = (fraction > 0) & (magnitude < fmt.max)  # neither of NaN
    count = (fraction * 256).floor()
    # The largest byte that should not do, in the arithmetic of the rule.
    lifted = (scaled.abs() + (step * (255 - count) / 256).float()).double() >= (whole + 1) * step
    chance = torch.where(moves & ~lifted, count, UNKNOWN).to(torch.int16)
    below = code & (fmt.sign_code - 1)
    above = torch.where(moves, (below + 1) | scaled.signbit().byte() * fmt.sign_code, code)
    return below, ordinal.signed_codes(code, fmt), ordinal.signed_codes(above, fmt), chance
