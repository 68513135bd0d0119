"""Random bytes at which stochastic rounding takes another code."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from narrowgauge.reference.numbers.blocks import of_rows
from narrowgauge.reference.numbers.rounding import stochastic
from narrowgauge.reference.quantize.scaling import scale_elements
from narrowgauge.reference.quantize.steps import row_factors
from narrowgauge.spec.formats import Format
from narrowgauge.spec.quantized import Quantized

AROUND = (-1, 0, 1)
"""Distances of the tried random bytes from the first byte with another code."""


def scaled_elements(x: torch.Tensor, q: Quantized) -> torch.Tensor:
    """The elements of `x` (M, K), rotated already, that are rounded to the codes of `q`: float32 (M, K)."""
    factors = row_factors(q.scales, q.tensor_scale, q.recipe, x, None)
    return scale_elements(x, factors, of_rows(q.tensor_scale, slice(None)), q.recipe)


def first_bytes(scaled: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The least random byte with another code than byte 0, int16; 256 if all bytes have one code.

    Larger bytes round to the code of byte 0 or to the next one, never back.
    """
    least = stochastic(scaled, fmt, scaled.new_zeros(scaled.shape, dtype=torch.uint8))
    low = torch.zeros(scaled.shape, dtype=torch.int16, device=scaled.device)
    for step in (128, 64, 32, 16, 8, 4, 2, 1):  # low has the code of byte 0
        other = low + step
        low = torch.where(stochastic(scaled, fmt, other.to(torch.uint8)) == least, other, low)
    return low + 1


def random_words(scaled: torch.Tensor, fmt: Format) -> Iterator[torch.Tensor]:
    """Words, int32 (M, ⌈K/4⌉), whose bytes lie below, at and above the first byte with another code."""
    first = first_bytes(scaled, fmt)
    for distance in AROUND:
        tried = (first + distance).clamp(0, 255).to(torch.uint8)
        yield torch.nn.functional.pad(tried, (0, -tried.shape[1] % 4)).contiguous().view(torch.int32)
