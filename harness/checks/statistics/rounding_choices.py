"""Candidate codes of stochastic rounding, and their probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.rotation_interval import power_of_two
from narrowgauge.reference.quantize.elements import element_codes
from narrowgauge.spec.recipes import Recipe

UNKNOWN = -1


@dataclass
class RoundingChoices:
    """Correct codes of every element of a matrix (M, K), and the probability that its magnitude rounds up."""

    below: torch.Tensor
    """uint8: code without sign of the grid point at or below the magnitude; the code of NaN for a NaN."""
    least: torch.Tensor
    greatest: torch.Tensor
    """int64: `ordinal.signed_code_ordinals` of the smallest and the largest correct code."""
    up_bytes: torch.Tensor
    """int16: number of the 256 values of a random byte for which the magnitude rounds up. It is ⌊256·f⌋, with f the
    distance to the grid point below, in steps. UNKNOWN if nothing is random or the value is not known."""

    def outside(self, codes: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        """Steps from codes (uint8 (…, M, K), a byte for each element) to the nearest correct code, int64."""
        ordinals = ordinal.signed_code_ordinals(codes, recipe.element)
        return torch.maximum(self.least - ordinals, ordinals - self.greatest).clamp_(min=0)

    def rounded_up(self, codes: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        """bool mask of the magnitudes that were rounded up."""
        return codes & (recipe.element.sign_code - 1) != self.below


def rounding_choices(lower: torch.Tensor, upper: torch.Tensor, recipe: Recipe) -> RoundingChoices:
    """Choices of stochastic rounding for scaled values in [lower, upper], float32 (M, K).

    If the values are known, `lower` and `upper` are the same tensor. Source: docs/numerics.md#stochastic-rounding:
    t = fl(|v| + u·step) is truncated to the grid. This sum rounds, so it can reach the grid point above for a smaller
    byte than the exact |v| + u·step. A kernel that compares bits uses the exact sum. Both are correct, and if they
    differ, `up_bytes` is UNKNOWN. It is also UNKNOWN if `lower` and `upper` differ.
    """
    below, low, high, up_bytes = _neighbours(lower, recipe)
    if upper is lower:
        least, greatest = torch.minimum(low, high), torch.maximum(low, high)
        return RoundingChoices(below, least, greatest, up_bytes)
    _, upper_low, upper_high, _ = _neighbours(upper, recipe)
    equal_ends = (lower == upper) & (lower.signbit() == upper.signbit())
    return RoundingChoices(
        below,
        torch.minimum(low, high),
        torch.maximum(upper_low, upper_high),
        torch.where(equal_ends, up_bytes, UNKNOWN),
    )


def _neighbours(scaled: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Code below without its sign, ordinals of the codes below and above, and `up_bytes`."""
    fmt = recipe.element
    code = element_codes(scaled, recipe, torch.zeros_like(scaled, dtype=torch.uint8))
    magnitude = scaled.abs().double()
    exponent = torch.frexp(magnitude.clamp(min=2.0 ** (1 - fmt.bias), max=fmt.max)).exponent - 1
    step = power_of_two(exponent - fmt.mantissa_bits)
    steps = magnitude / step
    whole = steps.floor()
    fraction = steps - whole
    inexact = (fraction > 0) & (magnitude < fmt.max)  # both comparisons are false for NaN
    up_count = (fraction * 256).floor()
    # Whether fl(|v| + u·step) reaches the grid point above for the largest byte that must not round up.
    lifted = (scaled.abs() + (step * (255 - up_count) / 256).float()).double() >= (whole + 1) * step
    up_bytes = torch.where(inexact & ~lifted, up_count, UNKNOWN).to(torch.int16)
    below = code & (fmt.sign_code - 1)
    above = torch.where(inexact, (below + 1) | scaled.signbit().byte() * fmt.sign_code, code)
    return below, ordinal.signed_code_ordinals(code, fmt), ordinal.signed_code_ordinals(above, fmt), up_bytes
