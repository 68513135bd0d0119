"""Mistakes in the exponents of E8M0 block scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import get_args

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.elements.roundings import shifted_codes
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.reference.quantize.exponents import exponent_codes
from narrowgauge.spec.formats import E8M0
from narrowgauge.spec.recipe import BlockScale, ScaleRounding
from narrowgauge.spec.recipes import Recipe

_SCALES = frozenset({"scales"})
_ROUNDING_PHRASES = {
    "up": "rounded up to a power of two", "down": "rounded down to a power of two",
    "as-element": "rounded as the element's mantissa is, then down", "up-from-1.75": "rounded up from mantissa 1.75 on",
    "nearest-log2": "rounded to the nearest power of two by logarithm",
}  # fmt: skip


_FORMS = ("amax*(1/max)", "amax/max", "amax*2^-emax")


def unrounded_exponents(replay: Replay) -> torch.Tensor:
    """Scales before they are rounded to powers of two, float32."""
    if replay.recipe.block_scale == "amax*2^-emax":
        exponent = torch.frexp(torch.tensor(replay.recipe.element.max)).exponent - 1
        return torch.ldexp(replay.blocks, -exponent.to(replay.blocks.device))
    return replay.blocks * (1.0 / replay.recipe.element.max)


def _clamped(exponent: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Codes of exponents, limited to the range of E8M0. Zero, infinity and NaN in `value` give their codes."""
    code = torch.where(value.isinf(), E8M0.max_code, exponent + E8M0.bias).clamp(0, E8M0.max_code)
    return torch.where(value.isnan(), E8M0.nan_code or 0, torch.where(value == 0, 0, code)).to(torch.uint8)


def _nearest(r: Replay) -> torch.Tensor:
    """Round to nearest, ties to the even code: a mantissa of 1.5 rounds up if the exponent is odd."""
    value = unrounded_exponents(r)
    mantissa, exponent = torch.frexp(value)
    exponent = exponent - 1
    tie_up = (exponent + E8M0.bias) % 2 == 1
    return _clamped(exponent + ((mantissa > 0.75) | ((mantissa == 0.75) & tie_up)).int(), value)


def _by_logarithm(r: Replay) -> torch.Tensor:
    value = unrounded_exponents(r)
    logarithm = torch.log2(torch.where((value > 0) & value.isfinite(), value, 1.0))
    return _clamped(logarithm.ceil().int(), value)


def _power_of_two_raised(least: float, r: Replay) -> torch.Tensor:
    """Correct codes, but powers of two from `least` on are raised to the next power of two."""
    value, expected_codes = unrounded_exponents(r), exponent_codes(r.blocks, r.recipe)
    mantissa, exponent = torch.frexp(value)
    return torch.where((mantissa == 0.5) & (value > 0) & (value >= least), _clamped(exponent, value), expected_codes)


def _other_choices(*fields: str) -> Callable[[Recipe], Iterator[tuple[str, tuple[Recipe, str]]]]:
    """Recipes with other values of these fields: the first field's value, the recipe, and a phrase for the rounding."""

    def choices(recipe: Recipe) -> Iterator[tuple[str, tuple[Recipe, str]]]:
        for rounding, form in product(get_args(ScaleRounding), get_args(BlockScale)):
            values = {"scale_rounding": rounding, "block_scale": form}
            different = {name for name, value in values.items() if getattr(recipe, name) != value}
            if different == set(fields) and rounding in _ROUNDING_PHRASES and form in _FORMS:
                changed = replace(recipe, scale_rounding=rounding, block_scale=form)
                yield values[fields[0]], (changed, _ROUNDING_PHRASES[rounding])

    return choices


def shifted(step: int, r: Replay) -> torch.Tensor:
    """Scales with codes that are larger by `step`."""
    return shifted_codes(step, r.compute_stage("scales"), r.recipe.scale)


def _changed(choice: tuple[Recipe, str], _: Replay) -> Recipe:
    return choice[0]


EXPONENTS: tuple[QuantizeDeviation, ...] = (
    Deviation("exponent:{}", "scales: {1[0].block_scale}, {1[1]}", "recipe", _changed,
              _other_choices("scale_rounding"), stages=_SCALES),
    Deviation("scale-order:{}", "scales: {0}, {1[1]}", "recipe", _changed, _other_choices("block_scale"),
              stages=_SCALES),
    Deviation("exponent:{}", "scales: {1[0].block_scale}, {1[1]}", "recipe", _changed,
              _other_choices("scale_rounding", "block_scale"), stages=_SCALES),
    Deviation("exponent:{}", "scales: rounded to the {} power of two, as a cast does", "scales",
              lambda codes, r: codes(r), {"nearest": _nearest}, implausible=True),
    Deviation("exponent:{}", "scales: rounded up by a logarithm of float32", "scales", lambda codes, r: codes(r),
              {"by-logarithm": _by_logarithm}, implausible=True),
    Deviation("exponent-power-of-two", "scales: a power of two{} is rounded up to the next one", "scales",
              _power_of_two_raised, {"": 0.0, " from 2^-126 on": 2.0**-126}, implausible=True),
    Deviation("exponent:{}", "scales: the exponent is 1 larger", "scales", shifted, {"+1": 1}, implausible=True),
    Deviation("exponent:{}", "scales: the exponent is 1 smaller", "scales", shifted, {"-1": -1}, implausible=True),
)  # fmt: skip
"""Wrong E8M0 scales."""


def _code_replaced(
    condition: Callable[[torch.Tensor], torch.Tensor], codes: tuple[int, int], r: Replay
) -> torch.Tensor:
    """Scales with the second of two codes replaced by the first, for blocks whose amax has a property."""
    kernel_code, expected_code = codes
    scales = r.compute_stage("scales")
    return scales.masked_fill((scales == expected_code) & condition(r.blocks), kernel_code)


SINGLE_CODES: tuple[QuantizeDeviation, ...] = (
    Deviation("exponent-code-{}", "scales: code {1[0]} in place of {1[1]}", "scales",
              partial(_code_replaced, lambda amax: torch.ones_like(amax, dtype=torch.bool))),
    Deviation("exponent-code-{}", "scales: code {1[0]} for blocks of zeros", "scales",
              partial(_code_replaced, lambda amax: amax == 0)),
    Deviation("exponent-code-{}", "scales: code {1[0]} in place of {1[1]}, but not for zeros", "scales",
              partial(_code_replaced, lambda amax: amax != 0)),
    Deviation("exponent-code-{}", "scales: code {1[0]} for an infinite amax", "scales",
              partial(_code_replaced, torch.isinf)),
)  # fmt: skip
"""A wrong code of a single scale."""


def single_code_deviations(
    matrices: Sequence[KernelMatrix], expected: Sequence[torch.Tensor]
) -> Iterator[QuantizeDeviation]:
    """A wrong code in place of code 0, 254 or 255, if all wrong scales have the same expected and the same wrong code.

    `expected`: scales of the reference for each matrix.
    """
    if not matrices or matrices[0].subject.recipe.scale is not E8M0:
        return
    expected_codes = torch.cat([codes.flatten() for codes in expected])
    kernel_codes = torch.cat([matrix.kernel_stages["scales"].flatten() for matrix in matrices])
    wrong = expected_codes != kernel_codes
    expected_values, kernel_values = (torch.unique(codes[wrong]) for codes in (expected_codes, kernel_codes))
    if len(expected_values) != 1 or len(kernel_values) != 1:
        return
    expected_code, kernel_code = int(expected_values), int(kernel_values)
    if expected_code not in (0, E8M0.max_code, E8M0.nan_code):
        return
    for row in SINGLE_CODES:
        yield row.bound(expected_code, (kernel_code, expected_code))
