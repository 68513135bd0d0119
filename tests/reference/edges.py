"""Blocks whose scale is a close call."""

from __future__ import annotations

import torch

from narrowgauge.spec.formats import E4M3


def edges(amax: float) -> torch.Tensor:
    """float32 (379, 16): block amaxes of six times every midpoint of E4M3, times amax/2688, and one ulp either side.

    The first block is all `amax`.
    """
    points = torch.tensor(E4M3.values[: E4M3.max_code + 1])
    at = (points[1:] + points[:-1]) / 2 * 6 * (amax / 2688)
    blocks = torch.cat([at, at.nextafter(torch.tensor(float("inf"))), at.nextafter(torch.tensor(0.0))])
    generator = torch.Generator().manual_seed(4)
    x = (torch.rand(len(blocks), 16, generator=generator) * 2 - 1) * blocks.view(-1, 1)
    x[:, 7] = blocks
    return torch.cat([torch.full((1, 16), amax), x]).view(-1, 16)
