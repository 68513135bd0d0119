"""Matrices in another arrangement: columns in another order, matrices beside each other, rows and columns exchanged."""

from __future__ import annotations

import torch

from narrowgauge.reference.contracts.interval import Interval, negative


def arranged(x: Interval, order: str) -> Interval:
    """The columns of `x` (…, K) in an order of `narrowgauge.spec.program.COLUMN_ORDERS`. Raises ValueError for odd K
    unless the columns are repeated."""
    found = x.arranged(lambda t: t[..., _index(order, t.shape[-1], t.device)])
    mask = _negated(order, found.shape[-1], found.low.device)
    if mask is None:
        return found
    turned = negative(found)
    low = torch.where(mask, turned.low, found.low)
    high = low if found.point else torch.where(mask, turned.high, found.high)
    return Interval(low, high, found.nan, found.bits)


def transposed(x: Interval) -> Interval:
    """Rows and columns of `x` (M, K) exchanged; single elements (N,) stay."""
    return x.arranged(lambda t: t.mT.contiguous() if t.dim() == 2 else t)


def joined(first: Interval, second: Interval) -> Interval:
    """Two matrices (…, K/2) beside each other: (…, K)."""
    ends = [torch.cat(pair, -1) for pair in ((first.low, second.low), (first.high, second.high))]
    if first.point and second.point:
        ends[1] = ends[0]
    nan = None if first.nan is second.nan is None else torch.cat([first.may_be_nan, second.may_be_nan], -1)
    return Interval(ends[0], ends[1], nan, max(first.bits, second.bits))


def arranged_tensor(x: torch.Tensor, order: str) -> torch.Tensor:
    """The same of the numbers of a tensor (…, K)."""
    found = x[..., _index(order, x.shape[-1], x.device)]
    mask = _negated(order, found.shape[-1], x.device)
    return found if mask is None else torch.where(mask, -found, found)


def _index(order: str, size: int, device: torch.device) -> torch.Tensor:
    """The column of `x` at each column of the result."""
    if order.startswith("repeated"):
        column = torch.arange(2 * size, device=device)
        return column // 2 if order == "repeated-pairs" else column % max(size, 1)
    if size % 2:
        raise ValueError(f"the last axis has {size} elements, which are not pairs")
    column = torch.arange(size, device=device)
    if order == "even-odd":
        return torch.cat([column[::2], column[1::2]])
    if order == "interleaved":
        return column.view(2, -1).T.flatten()
    return column ^ 1 if order == "rotated-pairs" else column.roll(size // 2)


def _negated(order: str, size: int, device: torch.device) -> torch.Tensor | None:
    """Columns of a rotated matrix with the other sign: the first column of each pair."""
    if not order.startswith("rotated"):
        return None
    column = torch.arange(size, device=device)
    return column % 2 == 0 if order == "rotated-pairs" else column < size // 2
