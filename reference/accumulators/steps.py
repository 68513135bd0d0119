"""The steps of a matrix instruction, simulated in float64, which holds every intermediate number exactly.

Source: docs/accumulators.md#a-step. float64 tensors have the shape (M, N) of the accumulators, or (M, N, L).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.reference.accumulators.hardware import HardwareModel
from narrowgauge.reference.gemm.tensor_core import power_of_two

_FLOAT32_SMALLEST, _FLOAT16_SMALLEST = 2.0**-126, 2.0**-14
_FLOAT16_MAX = 65504.0
_TF32_MASK = ~((1 << 13) - 1)
# Exponent of a zero term that never decides the largest exponent.
_NO_EXPONENT = 2.0**-700
_GROUP = 16


@dataclass
class Side:
    """Columns of an operand (M, L) of a step: float64 values and the powers of two of their exponents."""

    values: torch.Tensor
    powers: torch.Tensor
    scales: torch.Tensor | None = None
    """Block scales (M, L/block), float64; None without scales."""


def side(values: torch.Tensor, model: HardwareModel, operand: str, scales: torch.Tensor | None = None) -> Side:
    """An operand (M, K) of a model, from numbers of its format. float32 operands of TF32 are truncated."""
    if operand == "tf32":
        values = (values.float().contiguous().view(torch.int32) & _TF32_MASK).view(torch.float32)
    smallest = model.smallest_exponent(operand)
    values = values.double()
    if model.flushes:
        values = values.where(values.abs() >= 2.0**smallest, 0.0).where(values.isfinite(), values)
    powers = power_of_two(values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)).clamp(min=2.0**smallest)
    return Side(values, powers, scales)


def step(left: Side, right: Side, accumulator: torch.Tensor, model: HardwareModel) -> torch.Tensor:
    """The accumulator (M, N) after the products of a step, (M, L) and (N, L), float64."""
    if model.kind == "pairwise":
        return _pairwise(left, right, accumulator, model)
    products, exponents = _terms(left, right, model)
    ieee = products.sum(2) + accumulator
    if model.kind in ("aligned", "scaled-groups"):
        total = aligned(_all_terms(products, exponents, accumulator, model), model)
    else:
        positive, negative = ((sign * products >= 2.0**128).any(2) for sign in (1, -1))
        limit = torch.where(positive & negative, torch.nan, torch.where(positive, torch.inf, -torch.inf))
        ieee = ieee.where(~(positive | negative) | ~ieee.isfinite(), limit.double())
        total = _rounded_down(products, exponents, accumulator, model)
    return convert(total, model).where(ieee.isfinite(), ieee)


def _terms(left: Side, right: Side, model: HardwareModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The terms of a step and the powers of their exponents, (M, N, T). With groups: T sums of 16 products."""
    products = left.values.unsqueeze(1) * right.values
    powers = left.powers.unsqueeze(1) * right.powers
    if left.scales is None or right.scales is None:
        return products, powers
    per_scale = left.values.shape[1] // left.scales.shape[1]
    scales = left.scales.unsqueeze(1) * right.scales
    if model.kind == "aligned":
        scale_powers = power_of_two(scales.nan_to_num(nan=1.0)).repeat_interleave(per_scale, 2)
        return products * scales.repeat_interleave(per_scale, 2), powers * scale_powers
    groups = products.reshape(*products.shape[:2], -1, _GROUP).sum(3)
    scale_powers = _scale_powers(left.scales, model).unsqueeze(1) * _scale_powers(right.scales, model)
    repeats = per_scale // _GROUP
    return groups * scales.repeat_interleave(repeats, 2), scale_powers.repeat_interleave(repeats, 2)


def _scale_powers(scales: torch.Tensor, model: HardwareModel) -> torch.Tensor:
    """Powers of two of the exponents of block scales; 0 for a scale of 0."""
    powers = power_of_two(scales.nan_to_num(nan=1.0))
    return powers.clamp(min=2.0**-6).where(scales != 0, 0.0) if model.scale == "e4m3" else powers


def accumulator_powers(accumulator: torch.Tensor, model: HardwareModel) -> torch.Tensor:
    """Powers of two of the exponents of accumulators; a subnormal one has that of the smallest normal number."""
    smallest = _FLOAT16_SMALLEST if model.half else _FLOAT32_SMALLEST
    return power_of_two(accumulator.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)).clamp(min=smallest)


def _all_terms(
    products: torch.Tensor, powers: torch.Tensor, accumulator: torch.Tensor, model: HardwareModel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Products and accumulator as terms (M, N, T + 1), and the largest power of their exponents (M, N).

    A zero term has the exponent e0, except a group of the scaled kind, whose exponent is that of its scales.
    """
    terms = torch.cat([products, accumulator.unsqueeze(2)], 2)
    zero = 2.0**model.zero_exponent
    if model.kind == "aligned":
        powers = powers.where(products != 0, zero)
    added = accumulator_powers(accumulator, model).where(accumulator != 0, zero)
    return terms, torch.maximum(powers.amax(2), added)


def aligned(terms: tuple[torch.Tensor, torch.Tensor], model: HardwareModel) -> torch.Tensor:
    """The exact sum of terms that are truncated toward zero behind F bits of the largest exponent."""
    values, largest = terms
    unit = largest * 2.0**-model.fraction
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).div_(unit.unsqueeze(2)).trunc_().sum(2).mul_(unit)


def _rounded_down(
    products: torch.Tensor, powers: torch.Tensor, accumulator: torch.Tensor, model: HardwareModel
) -> torch.Tensor:
    """CDNA 3: the products are aligned and truncated; their sum and the accumulator are rounded down to one grid."""
    products = products.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    powers = powers.where(products != 0, _NO_EXPONENT)
    added = accumulator_powers(accumulator, model).where(accumulator != 0, _FLOAT32_SMALLEST)
    accumulator = accumulator.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if model.kind == "rounded-down-halves":
        halves = [(products[:, :, k::2], powers[:, :, k::2].amax(2)) for k in (0, 1)]
        largest = torch.maximum(halves[0][1], halves[1][1])
        unit = largest * 2.0**-model.fraction
        total = sum(((aligned(half, model) / unit).floor() * unit for half in halves), torch.zeros_like(unit))
        every = torch.maximum(largest, added)
        accumulator = accumulator.where(added * 2.0 ** (model.fraction + 1) >= every, 0.0)
    else:
        largest = powers.amax(2)
        total = aligned((products, largest), model)
        every = torch.maximum(largest, added)
    fine, coarse = every * 2.0**-31, every * 2.0**-model.fraction
    return (total / fine).floor() * fine + (accumulator / coarse).floor() * coarse


def _pairwise(left: Side, right: Side, accumulator: torch.Tensor, model: HardwareModel) -> torch.Tensor:
    """CDNA 1 and 2: the rounded products are added in a tree of float32 numbers, then to the accumulator."""

    def flushed(x: torch.Tensor) -> torch.Tensor:
        return x.where(~(x.abs() < _FLOAT32_SMALLEST), x * 0.0) if model.flushes else x

    terms = flushed((left.values.unsqueeze(1) * right.values + 0.0).float())
    while terms.shape[2] > 1:
        terms = flushed(terms[:, :, 0::2] + terms[:, :, 1::2])
    return flushed(flushed(accumulator.float()) + terms[:, :, 0]).double()


def convert(total: torch.Tensor, model: HardwareModel) -> torch.Tensor:
    """The exact sum as a number of the accumulator, float64."""
    smallest = _FLOAT16_SMALLEST if model.half else _FLOAT32_SMALLEST
    unit = power_of_two(total).clamp_(min=smallest).mul_(2.0**-model.kept)
    scaled = total / unit
    result = (scaled.round() if model.nearest else scaled.trunc()) * unit + 0.0
    if model.half:
        return result.where(result.abs() <= _FLOAT16_MAX, result.sign() * torch.inf)
    return result.float().double()
