"""Scales of NVFP4 in the encoding S0E5M3 of Marlin: vLLM 0.33, `nvfp4_marlin_process_scales`.

A byte holds the five exponent bits and the three upper mantissa bits of the float16 number s·F·2^7: the code of UE5M3
of this number; numbers below 2 become 0. F is a power of two, 1 for an output in float16, and the tensor scale is
divided by F. Releases choose F differently, and older ones have no F, so the caller gives it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from narrowgauge.adapt.number_codes import codes_of_numbers
from narrowgauge.spec.formats import E4M3, UE5M3

_SHIFT = 2.0**7
_LEAST = 2.0
"""Numbers s·F·2^7 below this one become 0."""


class MarlinScales(NamedTuple):
    """Scales as Marlin stores them before its permutation."""

    scales: torch.Tensor
    """Bytes of S0E5M3, in the shape of the scales."""
    tensor_scale: torch.Tensor
    """The decode factor of the tensor, divided by F."""


def marlin_scales(scales: torch.Tensor, tensor_scale: torch.Tensor, factor: float) -> MarlinScales:
    """E4M3 scales, uint8, in S0E5M3, and the decode factor of the tensor that belongs to them, float32.

    factor: F. Raises ValueError for a negative or NaN scale, and for a factor under which a scale exceeds the largest
    number of float16.
    """
    values = torch.tensor(E4M3.values, dtype=torch.float64, device=scales.device)[scales.long()]
    if bool((values.isnan() | (values < 0)).any()):
        raise ValueError("scales are negative or NaN; Marlin stores no sign")
    largest = float(values.amax()) if values.numel() else 0.0
    numbers = values * factor * _SHIFT
    numbers = numbers.where(numbers >= _LEAST, 0.0)
    if bool((numbers > 65504).any()):
        number = largest * factor * _SHIFT
        raise ValueError(f"factor is {factor}, and the largest scale {largest}: {number} is no float16")
    return MarlinScales(codes_of_numbers(numbers, UE5M3, "scales"), tensor_scale / factor)


def from_marlin_scales(stored: torch.Tensor, factor: float) -> torch.Tensor:
    """E4M3 scales, uint8, of bytes of S0E5M3. Scales that Marlin stores as 0 stay 0.

    Raises ValueError for a number that is no E4M3 scale times F.
    """
    numbers = torch.tensor(UE5M3.values, dtype=torch.float64, device=stored.device)[stored.long()]
    return codes_of_numbers(numbers / (factor * _SHIFT), E4M3, "scales")
