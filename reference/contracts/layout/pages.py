"""Sequences in pages: which cell of a cache each token of a request has, and the rows of each request."""

from __future__ import annotations

import torch

from narrowgauge.reference.contracts.interval import Interval
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.spec.formats import E4M3


def paged(cache: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor) -> Interval:
    """The numbers (B, W·P, G, D) of E4M3 codes (N, P, G, D) in the pages (B, W) of each request; 0 behind its length.

    Raises ValueError for a request with no token, and with more than W·P.
    """
    count, page = pages.shape[1], cache.shape[1]
    wrong = lengths[(lengths < 1) | (lengths > count * page)]
    if wrong.numel():
        raise ValueError(f"a request has {int(wrong[0])} tokens; its {count} pages of {page} hold 1 to {count * page}")
    numbers = decode(cache[pages], E4M3, torch.float64).flatten(1, 2)
    behind = torch.arange(numbers.shape[1], device=cache.device) >= lengths.unsqueeze(1)
    numbers = numbers.masked_fill(behind.view(*behind.shape, 1, 1), 0.0)
    return Interval(numbers, numbers, bits=4)


def segments(lengths: torch.Tensor, part: str) -> Interval:
    """The number of the request of each row, or the place of the row in its request: (M, 1, 1)."""
    request = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    if part == "place":
        first = lengths.cumsum(0) - lengths
        request = torch.arange(len(request), device=lengths.device) - first[request]
    number = request.double().view(-1, 1, 1)
    return Interval(number, number, bits=24)


def places(x: Interval) -> Interval:
    """0, 1, … along the second axis."""
    number = torch.arange(x.shape[1], dtype=torch.float64, device=x.low.device)
    return Interval(number, number, bits=24)
