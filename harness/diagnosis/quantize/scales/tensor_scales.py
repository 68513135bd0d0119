"""Mistakes in the amax of a tensor and in the tensor scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.elements.roundings import (
    NARROW,
    POWERS,
    UPPER_BITS,
    flush,
    narrowed,
    power_of_two,
    upper_bits,
)
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.reference.quantize.scaling import FLT_MAX, divide, tensor_scale
from narrowgauge.reference.quantize.steps import block_amaxes
from narrowgauge.spec.recipes import Recipe

SCALES_FOR_ZERO_AMAX = {"the largest number": FLT_MAX, "2^127": 2.0**127, "infinite": inf, "0": 0.0}
"""Wrong scales for an amax of 0, where the recipe prescribes 1."""


def tensor_scale_deviations(recipe: Recipe, *, amax_given: bool = False) -> Iterator[QuantizeDeviation]:
    """Deviations of the tensor's amax and scale, the most plausible first. None if the recipe has no tensor scale.

    `amax_given`: whether the amax is an argument. A kernel then computes none, and its only deviation is to ignore it.
    """
    if recipe.tensor_scale == "none":
        return
    yield from rows_of((GIVEN_AMAX,) if amax_given else AMAXES, recipe)
    yield from rows_of(GIVEN_SCALES if recipe.tensor_scale == "given" else TENSOR_SCALES, recipe)


def amax_of(r: Replay, change: Callable[[torch.Tensor], torch.Tensor] | None = None, **policy: str) -> torch.Tensor:
    """Amax of the changed matrix, or of the matrix with another policy of NaN."""
    x = r.x if change is None else change(r.x)
    return r.amax_of(block_amaxes(x, replace(r.recipe, **policy)))  # type: ignore[arg-type]


def _amax_for_rows(r: Replay) -> torch.Tensor:
    return r.correct_amax.amax().expand(r.correct_amax.shape).contiguous()


def _of_saturated(invert: bool, r: Replay) -> torch.Tensor:
    """The amax of the elements that the given scale, or its inverse, lets through without saturation."""
    scale = r.tensor_scale
    assert scale is not None
    scale = divide(1.0, scale) if invert else scale
    return (r.correct_amax * scale).clamp(max=r.recipe.element.max) / scale


GIVEN_AMAX: QuantizeDeviation = Deviation(
    "given-amax-ignored", "the amax is that of the matrix, not the given one", "amax", lambda r: r.correct_amax
)
LARGEST_ELEMENT: QuantizeDeviation = Deviation(
    "amax-without-fabs", "the amax of the tensor is of the elements, not of their magnitudes", "amax",
    lambda r: amax_of(r, lambda x: x.clamp(min=0)),
)  # fmt: skip
"""The amax that is the largest element. Evidence of several cases names it (`observed_amaxes`)."""
AMAXES: tuple[QuantizeDeviation, ...] = (
    Deviation("nan-spread", "the amax of the tensor is NaN where an element is", "amax",
              lambda r: amax_of(r, nan="propagate"), when=lambda recipe: recipe.nan == "ignore"),
    Deviation("nan-dropped", "the amax of the tensor is without elements that are NaN", "amax",
              lambda r: amax_of(r, nan="ignore"), when=lambda recipe: recipe.nan != "ignore"),
    Deviation("infinity-dropped", "the amax of the tensor is without elements that are infinite", "amax",
              lambda r: amax_of(r, lambda x: x.masked_fill(x.isinf(), 0))),
    Deviation("amax-after-saturation", "the amax of the tensor is that of its elements after they are saturated",
              "amax", _of_saturated, {"": False, " by the inverse": True},
              when=lambda recipe: recipe.tensor_scale == "given"),
    Deviation("amax-through-{}", "the amax of the tensor is rounded to {}", "amax", narrowed(lambda r: r.correct_amax),
              NARROW, implausible=True),
    Deviation("amax-truncated:{}", "the amax of the tensor is cut to the upper {1} bits of float32", "amax",
              lambda bits, r: upper_bits(r.correct_amax, bits), UPPER_BITS, implausible=True),
    Deviation("amax-exponent:{}", "the amax of the tensor is rounded {} to a power of two", "amax",
              lambda direction, r: power_of_two(direction, r.correct_amax), POWERS),
    Deviation("amax-of-tensor", "the amax of every row is that of the tensor", "amax", _amax_for_rows,
              when=lambda recipe: recipe.granularity == "row"),
)  # fmt: skip
"""Wrong amaxes that the kernel computes."""


def _of_present_amax(form: Callable[[torch.Tensor, float], torch.Tensor]) -> Callable[[Replay], torch.Tensor]:
    """The scale `form` of the amax and of the largest element, in place of the given scale."""

    def scale(r: Replay) -> torch.Tensor:
        amax = r.correct_amax
        return torch.where((amax > 0) & amax.isfinite(), form(amax, r.recipe.element.max), 1.0)

    return scale


GIVEN_SCALES: tuple[QuantizeDeviation, ...] = (
    Deviation("tensor-scale-ignored", "the scale is that of the amax of the tensor, not the given one",
              "used tensor scale", _of_present_amax(lambda amax, most: divide(most, amax)), row_local=False),
    Deviation("tensor-scale-ignored", "the scale is that of the amax of the tensor, not the given one",
              "used tensor scale", _of_present_amax(lambda amax, most: divide(1.0, amax) * most), row_local=False),
)  # fmt: skip
"""A given tensor scale that the kernel ignores."""


def _amax(r: Replay) -> torch.Tensor:
    assert r.amax is not None
    return r.amax


def _inside_limits(form: Callable[[torch.Tensor, Recipe], torch.Tensor], r: Replay) -> torch.Tensor:
    """Tensor scale by `form` of the amax. If the correct scale is at a limit, the correct scale."""
    amax, correct, scale = _amax(r), r.correct_tensor_scale, form(_amax(r), r.recipe)
    return torch.where((amax > 0) & scale.isfinite() & (correct < FLT_MAX), scale, correct)


_ORDERS: dict[str, Callable[[torch.Tensor, Recipe], torch.Tensor]] = {
    "1/(amax/max)": lambda amax, recipe: divide(1.0, amax / torch.full_like(amax, recipe.max_product)),
    "1/(amax*(1/max))": lambda amax, recipe: divide(1.0, amax * (1.0 / recipe.max_product)),
    "(max/6)/amax*6": lambda amax, recipe: divide(recipe.max_product / recipe.element.max, amax) * recipe.element.max,
}
_CONSTANTS = {str(scale * element): float(scale * element) for scale in (448, 256, 240, 1) for element in (6, 5, 4, 1)}
"""Products of the largest block scale and the largest element, and of numbers that are taken for them."""
TENSOR_SCALES: tuple[QuantizeDeviation, ...] = (
    Deviation("subnormal-amaxes-flushed",
              "the scale of the tensor is that of an amax of 0 where the amax is subnormal", "tensor scale",
              lambda r: tensor_scale(flush(_amax(r)), r.recipe, r.x.dtype)),
    Deviation("tensor-scale-order:{}", "the scale of the tensor is {}", "tensor scale", _inside_limits, _ORDERS,
              lambda recipe: recipe.tensor_scale != "amax/max", implausible=True),
    Deviation("tensor-scale-through-{}", "the scale of the tensor is rounded to {}", "tensor scale",
              narrowed(lambda r: r.correct_tensor_scale), NARROW, implausible=True),
    Deviation("tensor-scale-constant:{}", "the scale of the tensor is {}/amax", "tensor scale",
              lambda constant, r: _inside_limits(lambda amax, recipe: divide(constant, amax), r), _CONSTANTS,
              lambda recipe: recipe.tensor_scale != "amax/max", implausible=True),
    Deviation("tensor-scale-exponent:{}", "the scale of the tensor is rounded {} to a power of two", "tensor scale",
              lambda number, r: torch.ldexp(torch.ones_like(r.correct_tensor_scale),
                                            torch.frexp(r.correct_tensor_scale).exponent - number),
              {"down": 1, "up": 0}, implausible=True),
    Deviation("zero-block-not-one", "the scale of the tensor is {} for an amax of 0, not 1", "tensor scale",
              lambda number, r: torch.where(_amax(r) == 0, number, r.correct_tensor_scale), SCALES_FOR_ZERO_AMAX,
              lambda recipe: recipe.tensor_limit in ("1-for-nan", "finite"), implausible=True),
    Deviation("tensor-scale-flushed", "the scale of the tensor is flushed to 0 where it is subnormal", "tensor scale",
              lambda r: flush(r.correct_tensor_scale), implausible=True),
    Deviation("tensor-scale-inverted", "the scale of the tensor is its inverse", "tensor scale",
              lambda r: divide(1.0, r.correct_tensor_scale), implausible=True),
)  # fmt: skip
"""Wrong tensor scales. Later stages show them if the kernel does not report the tensor scale."""
