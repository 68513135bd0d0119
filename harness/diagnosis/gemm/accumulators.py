"""Accumulators that kernels use in place of float32, and wrong promotions of the sum of a block to float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from narrowgauge.harness.diagnosis.gemm.gemm_parts import Ends, GemmDeviation, GemmParts, finish, ordered
from narrowgauge.reference.gemm.gemm import operand
from narrowgauge.reference.gemm.operands import scale_values
from narrowgauge.reference.gemm.promoted import Blocks
from narrowgauge.spec.quantized import Quantized

Narrow = Callable[[torch.Tensor], torch.Tensor]
"""float32 to float32, rounded to fewer bits."""
_STEPS = (1, 16, 32, 64, 128)
_LONGEST = 4096
"""Columns of K that are added one by one at most."""


@dataclass(frozen=True)
class Accumulator:
    """How a narrow accumulator adds: `step` columns of K are summed exactly, then added and rounded."""

    cause: str
    sentence: str
    narrow: Narrow
    step: int
    inside: bool
    """Of FP8 with scales of blocks: whether it is the sum of a block that is narrow, or that of all blocks."""

    def sums(self, terms: GemmParts) -> torch.Tensor | None:
        """What it holds at the end, float32 (M, N); None where it cannot add so."""
        if terms.left.shape[1] // self.step > _LONGEST:
            return None
        if terms.promotes:
            return self._promoted(terms)
        if self.inside:
            return None
        left, right = (operand(q).float() for q in (terms.left, terms.right))
        return self._added(left, right, torch.zeros(terms.output.shape, device=left.device))

    def _added(self, left: torch.Tensor, right: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        columns = left.shape[1]
        wide = None if self.step == 1 else (left.double(), right.double())
        for start in range(0, columns, self.step):
            if wide is None:  # products are exact in float32
                y = self.narrow(torch.addr(y, left[:, start], right[:, start]))
            else:
                part = slice(start, start + self.step)
                y = self.narrow(y + (wide[0][:, part] @ wide[1][:, part].T).float())
        return y

    def _promoted(self, terms: GemmParts) -> torch.Tensor | None:
        blocks = Blocks(terms.left, terms.right)
        if not self.inside and self.step != blocks.width:
            return None
        y = torch.zeros(terms.output.shape, device=terms.left.codes.device)
        for columns, number in blocks:
            s_a, s_b = blocks.scales(number)
            if self.inside:
                left, right = blocks.left[:, columns].float(), blocks.right[:, columns].float()
                y = y + self._added(left, right, torch.zeros_like(y)) * s_a * s_b
            else:
                y = self.narrow(y + blocks.sum(columns).to_float32() * s_a * s_b)
        return y


def accumulators(width: int) -> Iterator[Accumulator]:
    """Narrow accumulators of operands whose blocks have `width` columns, the likeliest first."""
    steps = sorted(set(_STEPS) | ({width} if width <= max(_STEPS) else set()))
    first = [step for step in steps if step == width]
    for step in [*first, *(step for step in steps if step != width)]:
        after = "each product" if step == 1 else f"every {step} columns of K"
        for cause, (words, narrow) in NARROW.items():
            for inside in (False, True):
                yield Accumulator(cause, f"sums are {words} after {after}", narrow, step, inside)


def _through(dtype: torch.dtype) -> Narrow:
    return lambda y: y.to(dtype).float()


def _bits(bits: int) -> Narrow:
    dropped = 24 - bits
    return lambda y: (y.view(torch.int32) & -(1 << dropped)).view(torch.float32)


NARROW: dict[str, tuple[str, Narrow]] = {
    "accumulator-bf16": ("rounded to bf16", _through(torch.bfloat16)),
    "accumulator-fp16": ("rounded to fp16", _through(torch.float16)),
    "accumulator-14-bits": ("cut to 14 bits of mantissa", _bits(14)),
}


def promotion_deviations() -> Iterator[GemmDeviation]:
    """Of products with float32 scales of blocks alone."""
    yield GemmDeviation(
        "scales-of-sum", "the scales of a block multiply all that is summed so far", _promoting, _scaled_sums
    )


def _promoting(terms: GemmParts) -> GemmParts | None:
    return terms if terms.promotes else None


def _scaled_sums(t: GemmParts, ends: Ends) -> list[Ends]:
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
