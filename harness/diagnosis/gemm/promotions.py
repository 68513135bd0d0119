"""What kernels do in place of y = fma(fl(P·s_a), s_b, y), P the sum of a block: FP8 with scales of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from narrowgauge.harness.diagnosis.gemm.product_deviation import Deviation
from narrowgauge.harness.diagnosis.gemm.terms import Ends, Terms, finish, ordered
from narrowgauge.reference.gemm.operands import scale_values
from narrowgauge.spec.quantized import Quantized


def promotion_deviations() -> Iterator[Deviation]:
    """Of products with float32 scales of blocks alone."""
    yield Deviation(
        "scales-of-sum", "the scales of a block multiply all that is summed so far", _promoting, _scaled_sums
    )


def _promoting(terms: Terms) -> Terms | None:
    return terms if terms.promotes else None


def _scaled_sums(t: Terms, ends: Ends) -> list[Ends]:
    """y = (y + P)·(s_a·s_b), which grows with y and P: no scale is below 0."""
    low = high = torch.zeros_like(ends[0])
    left, right = (scale_values(q).float() for q in (t.left, t.right))
    for number, start in enumerate(range(0, t.left.shape[1], t.left.recipe.block[1])):
        p = replace(t, left=_block(t.left, start), right=_block(t.right, start)).sums()
        scale = left[:, number : number + 1] * right[:, number]
        low, high = ordered((low + p.lower) * scale, (high + p.upper) * scale)
    return finish(t, (low, high))


def _block(q: Quantized, start: int) -> Quantized:
    """The codes of the block that begins at column `start`, under a scale of 1."""
    codes = q.codes[:, start : start + q.recipe.block[1]]
    ones = torch.ones(len(codes), 1, device=codes.device)
    return replace(q, codes=codes, scales=ones, shape=(len(codes), codes.shape[1]))
