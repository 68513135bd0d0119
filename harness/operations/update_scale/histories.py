"""The input families of an update-scale: histories of amaxes, float32 (H, N), the latest of each tensor first."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.generators import power_of_two


def _amaxes(draw: Draw, rows: int, tensors: int) -> torch.Tensor:
    # Each tensor its own power of two; in its history any mantissa, the largest anywhere.
    return (1.5 + 0.5 * draw.uniform(rows, tensors)) * power_of_two(draw.below(61, 1, tensors) - 30)


def _amaxes_zero_first(draw: Draw, rows: int, tensors: int) -> torch.Tensor:
    # The first amax of every second tensor is 0, as after a step without this tensor.
    history = _amaxes(draw, rows, tensors)
    history[0, draw.index(2) :: 2] = 0.0
    return history


def _amaxes_zeros(draw: Draw, rows: int, tensors: int) -> torch.Tensor:
    return torch.zeros(rows, tensors)


def _amaxes_tiny(draw: Draw, rows: int, tensors: int) -> torch.Tensor:
    # From the least subnormal number up past the amaxes below which max/amax is infinite, for E5M2 2^-112.
    exponent = torch.arange(tensors).add_(draw.index(64)) % 64 - 149
    scale = torch.ldexp(torch.ones(tensors, dtype=torch.float64), exponent)
    return ((1.5 + 0.5 * draw.uniform(rows, tensors)).double() * scale).float()


def _amaxes_with(bad: float) -> Callable[[Draw, int, int], torch.Tensor]:
    """Histories with `bad` as the first amax, a later amax, all amaxes or no amax, in turn from tensor to tensor."""

    def make(draw: Draw, rows: int, tensors: int) -> torch.Tensor:
        history = _amaxes(draw, rows, tensors)
        kind = (torch.arange(tensors) + draw.index(4)) % 4
        history[0, kind == 0] = bad
        place = draw.below(rows, tensors).long().clamp_(min=min(1, rows - 1))
        history[place[kind == 1], (kind == 1).nonzero().flatten()] = bad
        history[:, kind == 2] = bad
        return history

    return make


HISTORIES: dict[str, Callable[[Draw, int, int], torch.Tensor]] = {
    "amaxes": _amaxes,
    "amaxes-zero-first": _amaxes_zero_first,
    "amaxes-zeros": _amaxes_zeros,
    "amaxes-tiny": _amaxes_tiny,
    "amaxes-inf": _amaxes_with(math.inf),
    "amaxes-nan": _amaxes_with(math.nan),
}
"""From random numbers, H and N to a history."""
