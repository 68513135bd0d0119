"""The steps of attention hold what kernels may hold: weights under any running maximum, and sums in any order."""

from __future__ import annotations

import math

import pytest
import torch

from narrowgauge.reference.contracts.interval import Interval
from narrowgauge.reference.contracts.layout.attention import WEIGHTS, segments, shared_heads, weighted_sum, weights
from narrowgauge.spec.program import TILE, WEIGHT_DTYPES

CASTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def logits(seed: int, *, whole: bool) -> torch.Tensor:
    """Logits less their maximum: any numbers, or integers in base 2 with a few that vanish."""
    draw = torch.Generator().manual_seed(seed)
    d = -torch.rand(40, 2, 4 * TILE, generator=draw, dtype=torch.float64) * 8
    if whole:
        d = d.round() * math.log(2)
        d[:, :, :TILE] = -240 * math.log(2)
    return d - d.amax(-1, keepdim=True)


@pytest.mark.parametrize("whole", [False, True], ids=["any", "whole"])
@pytest.mark.parametrize("to", WEIGHT_DTYPES[2:])
def test_weights_under_every_running_maximum(to: str, whole: bool) -> None:
    d = logits(0, whole=whole)
    point = Interval(d, d)
    p = torch.exp(d)
    for name in (to, "any"):
        found = weights(Interval(p, p), point, name)
        tiles = d.view(40, 2, -1, TILE).amax(-1)
        scale = 2.0 ** WEIGHTS[to].power
        for maximum in tiles.unbind(-1):
            running = torch.maximum(tiles, maximum.unsqueeze(-1)).repeat_interleave(TILE, -1)
            factor = torch.exp(-running)
            kernel = (p * factor * scale).float().to(CASTS.get(to) or getattr(torch, to)).double() / scale / factor
            near = p > 2.0**-40
            assert bool(((kernel >= found.low) & (kernel <= found.high))[near].all())
            if whole and name == to:
                assert torch.equal(found.low[near], found.high[near])


def test_sums_of_the_ends_of_weights() -> None:
    draw = torch.Generator().manual_seed(1)
    low = torch.rand(3, 4, 32, generator=draw, dtype=torch.float64)
    p = Interval(low, low * (1 + 2.0**-7))
    v = torch.randint(-7, 8, (2 * 32 * 2, 8), generator=draw).double()
    request, lengths = torch.tensor([0, 1, 1]), torch.tensor([32, 32])
    head = shared_heads(Interval(low, low), lengths, len(v)).low.long()
    found = weighted_sum(p, Interval(v, v), request, head, lengths, narrow=False)
    tokens = v.view(2, 32, 2, 8)[request][:, :, head].permute(0, 2, 1, 3)
    largest = torch.where(tokens > 0, p.high.unsqueeze(-1), p.low.unsqueeze(-1)) * tokens
    smallest = torch.where(tokens > 0, p.low.unsqueeze(-1), p.high.unsqueeze(-1)) * tokens
    assert bool((found.low <= smallest.sum(2)).all())
    assert bool((found.high >= largest.sum(2)).all())
    assert bool((found.high - found.low <= 1.01 * (largest - smallest).sum(2) + 1e-3).all())


def test_sums_in_any_order_of_float32() -> None:
    draw = torch.Generator().manual_seed(2)
    p = torch.rand(1, 1, 512, generator=draw).double()
    v = torch.randn(512, 16, generator=draw).bfloat16().double()
    one = torch.zeros(1, dtype=torch.int64)
    found = weighted_sum(Interval(p, p), Interval(v, v), one, one, torch.tensor([512]), narrow=False)
    for seed in range(20):
        order = torch.randperm(512, generator=draw.manual_seed(seed))
        total = torch.zeros(16)
        for key in order.tolist():
            total = total + p[0, 0, key].float() * v[key].float()
        assert bool(((total.double() >= found.low[0, 0]) & (total.double() <= found.high[0, 0])).all())


def test_rows_and_heads_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ValueError, match=r"the requests have \[2, 3\] rows, and the batch has 6"):
        segments(torch.tensor([2, 3]), 6, "request")
    q = torch.zeros(1, 4, 8)
    with pytest.raises(ValueError, match="4 heads of rows do not share 3 heads of 5 tokens equally"):
        shared_heads(Interval(q, q), torch.tensor([5]), 15)
