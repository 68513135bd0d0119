"""Gain of a GEMM: a factor that multiplies all its outputs, or all its products before c and the bias are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from narrowgauge.harness.diagnosis.gemm.epilogues import before_last_cast
from narrowgauge.harness.diagnosis.gemm.gemm_parts import Ends, GemmParts, cast_ends, fits
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.spec.summation import UNIT

_LEAST_OUTPUTS = 16
"""Least number of outputs that are not 0 and determine the gain."""
_CAST = {torch.float32: UNIT, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Unit roundoff of an output."""


GAIN: Deviation[GemmParts] = Deviation("gain", "{0} are {1} times the expected", "output")


@dataclass(frozen=True)
class Gain:
    """A gain in [lower, upper], which does not contain 1. All outputs agree with it."""

    noun: str
    lower: float
    upper: float

    @property
    def row(self) -> Deviation[GemmParts]:
        """The deviation: the gain with as many digits as the outputs determine."""
        middle = (self.lower + self.upper) / 2
        digits = next((n for n in range(3, 12) if self.lower <= float(f"{middle:.{n}g}") <= self.upper), 12)
        return GAIN.bound(self.noun, f"{middle:.{digits}g}")


def find_gain(products: Sequence[GemmParts]) -> Gain | None:
    """The gain of all outputs, or of all products before the addends. None if no gain gives every output.

    Every output o that is not near 0 gives an interval: g·v rounds to o for a v between the ends of the value before
    the last cast, so g lies between the quotients of the ends of o's preimage and the ends of v. The gain lies in the
    intersection. Then all outputs are compared with the ends of g·v.
    """
    for noun in ("outputs", "products"):
        if noun == "products" and all(parts.c is None and parts.bias is None for parts in products):
            continue
        values = [_values(parts, noun) for parts in products]
        pairs = list(zip(products, values, strict=True))
        intervals = [interval for parts, value in pairs for interval in [_gains(parts, value, noun)]]
        lower, upper = (torch.cat([interval[end] for interval in intervals]) for end in (0, 1))
        if lower.numel() < _LEAST_OUTPUTS:
            continue
        least, most = float(lower.amax()), float(upper.amin())
        if least > most or least <= 1 <= most or not all(_gives(parts, v, noun, (least, most)) for parts, v in pairs):
            continue
        return Gain(noun, least, most)
    return None


def _values(parts: GemmParts, noun: str) -> Ends:
    """Ends (float64) of the outputs before the last cast, or of the products before the addends."""
    if noun == "products":
        parts = replace(parts, c=None, bias=None)
    candidates = before_last_cast(parts, parts.sums().ends)
    low, high = (torch.stack([y[end].double() for y in candidates]) for end in (0, 1))
    return low.amin(0), high.amax(0)


def _addends(parts: GemmParts) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and sum of magnitudes of the addends, float64 (M, N)."""
    total = torch.zeros(parts.output.shape, dtype=torch.float64, device=parts.output.device)
    size = total.clone()
    for addend in (parts.c, parts.bias):
        if addend is not None:
            total += addend.double()
            size += addend.double().abs()
    return total, size


def _gains(parts: GemmParts, value: Ends, noun: str) -> Ends:
    """Ends of the gains of single outputs. Outputs near 0, and outputs that are not finite, give none."""
    low, high = value
    output = parts.output.double()
    # Half a step of the output, and 6 roundings of float32 on the way.
    margin = output.abs() * (_CAST[parts.dtype] + 6 * UNIT)
    if noun == "products":
        total, size = _addends(parts)
        output, margin = output - total, margin + 6 * UNIT * size
    finite = output.isfinite() & low.isfinite() & high.isfinite()
    smallest = 4 * torch.finfo(parts.dtype).smallest_normal
    sized = (parts.output.abs() >= smallest) & (low.sign() == high.sign()) & (low.abs() >= smallest)
    at = (finite & sized & (output.abs() > 4 * margin)).nonzero(as_tuple=True)
    ends = [(output[at] + side * margin[at]) / end[at] for side in (-1, 1) for end in (low, high)]
    quotients = torch.stack(ends)
    return quotients.amin(0), quotients.amax(0)


def _gives(parts: GemmParts, value: Ends, noun: str, gain: tuple[float, float]) -> bool:
    """Whether all outputs lie between the ends of a gain times the value."""
    products = torch.stack([end * factor for end in value for factor in gain])
    low, high = products.amin(0), products.amax(0)
    if noun == "products":
        total, size = _addends(parts)
        low, high = low + total, high + total
        slack = 6 * UNIT * (size + torch.maximum(low.abs(), high.abs()))
    else:
        slack = 6 * UNIT * torch.maximum(low.abs(), high.abs())
    ends = (low - slack).float(), (high + slack).float()
    if parts.promotes and noun == "products":  # two casts
        rough = _CAST[parts.dtype] * torch.maximum(low.abs(), high.abs())
        ends = (low - slack - rough).float(), (high + slack + rough).float()
    return bool(fits(parts.output, [cast_ends(ends, parts.dtype)], torch.zeros_like(parts.wrong)).all())
