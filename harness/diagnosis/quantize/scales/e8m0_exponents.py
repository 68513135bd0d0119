"""Mistakes in the exponents of E8M0 block scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
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


def exponent_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of E8M0 scales, the most plausible first."""
    for changed_fields in ({"scale_rounding"}, {"block_scale"}, {"scale_rounding", "block_scale"}):
        for rounding in get_args(ScaleRounding):
            for form in get_args(BlockScale):
                different_fields = {
                    name for name, value in (("scale_rounding", rounding), ("block_scale", form))
                    if getattr(recipe, name) != value
                }  # fmt: skip
                if different_fields != changed_fields or rounding not in _ROUNDING_PHRASES or form not in _FORMS:
                    continue
                cause = f"exponent:{rounding}" if "scale_rounding" in changed_fields else f"scale-order:{form}"
                sentence = f"scales: {form}, {_ROUNDING_PHRASES[rounding]}"
                changed = replace(recipe, scale_rounding=rounding, block_scale=form)
                yield QuantizeDeviation(cause, sentence, _SCALES, recipe=changed)
    for cause, phrase, codes in (
        ("exponent:nearest", "rounded to the nearest power of two, as a cast does", _nearest),
        ("exponent:by-logarithm", "rounded up by a logarithm of float32", _by_logarithm),
        ("exponent-power-of-two", "a power of two is rounded up to the next one", partial(_power_of_two_raised, 0.0)),
        (
            "exponent-power-of-two",
            "a power of two from 2^-126 on is rounded up to the next one",
            partial(_power_of_two_raised, 2.0**-126),
        ),
    ):
        yield QuantizeDeviation(
            cause, f"scales: {phrase}", _SCALES,
            overrides={"scales": partial(_scale_codes, codes)}, implausible=True,
        )  # fmt: skip
    for step, phrase in ((1, "larger"), (-1, "smaller")):
        yield QuantizeDeviation(
            f"exponent:{step:+}", f"scales: the exponent is 1 {phrase}", _SCALES,
            overrides={"scales": partial(_shifted_exponents, step)}, implausible=True,
        )  # fmt: skip


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


def _nearest(value: torch.Tensor, replay: Replay) -> torch.Tensor:
    """Round to nearest, ties to the even code: a mantissa of 1.5 rounds up if the exponent is odd."""
    mantissa, exponent = torch.frexp(value)
    exponent = exponent - 1
    tie_up = (exponent + E8M0.bias) % 2 == 1
    return _clamped(exponent + ((mantissa > 0.75) | ((mantissa == 0.75) & tie_up)).int(), value)


def _by_logarithm(value: torch.Tensor, replay: Replay) -> torch.Tensor:
    logarithm = torch.log2(torch.where((value > 0) & value.isfinite(), value, 1.0))
    return _clamped(logarithm.ceil().int(), value)


def _power_of_two_raised(least: float, value: torch.Tensor, replay: Replay) -> torch.Tensor:
    """Correct codes, but powers of two from `least` on are raised to the next power of two."""
    expected_codes = exponent_codes(replay.blocks, replay.recipe)
    mantissa, exponent = torch.frexp(value)
    return torch.where((mantissa == 0.5) & (value > 0) & (value >= least), _clamped(exponent, value), expected_codes)


def _scale_codes(codes: Callable[[torch.Tensor, Replay], torch.Tensor], replay: Replay) -> torch.Tensor:
    return codes(unrounded_exponents(replay), replay)


def _shifted_exponents(step: int, replay: Replay) -> torch.Tensor:
    codes = Replay(replay.kernel_matrix).compute_stage("scales")
    shifted = (codes.int() + step).clamp(0, E8M0.max_code).to(torch.uint8)
    return torch.where(codes == (E8M0.nan_code or 0), codes, shifted)


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
    conditions: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
        (f"code {kernel_code} in place of {expected_code}", lambda amax: torch.ones_like(amax, dtype=torch.bool)),
        (f"code {kernel_code} for blocks of zeros", lambda amax: amax == 0),
        (f"code {kernel_code} in place of {expected_code}, but not for zeros", lambda amax: amax != 0),
        (f"code {kernel_code} for an infinite amax", torch.isinf),
    )
    for phrase, condition in conditions:

        def override(replay: Replay, condition: Callable[[torch.Tensor], torch.Tensor] = condition) -> torch.Tensor:
            codes = Replay(replay.kernel_matrix).compute_stage("scales")
            return codes.masked_fill((codes == expected_code) & condition(replay.blocks), kernel_code)

        cause = f"exponent-code-{expected_code}"
        yield QuantizeDeviation(cause, f"scales: {phrase}", _SCALES, overrides={"scales": override})
