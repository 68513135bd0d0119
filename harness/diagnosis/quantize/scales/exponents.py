"""What kernels do in place of a recipe's rule for the exponent of a block scale of E8M0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Run
from narrowgauge.harness.diagnosis.quantize.evidence import Evidence
from narrowgauge.reference.quantize.exponents import exponent_codes
from narrowgauge.spec.formats import E8M0
from narrowgauge.spec.recipe import BlockScale, ScaleRounding
from narrowgauge.spec.recipes import Recipe

_SCALES = frozenset({"scales"})
_WORDS = {
    "up": "rounded up to a power of two", "down": "rounded down to a power of two",
    "as-element": "rounded as the element's mantissa is, then down", "up-from-1.75": "rounded up from mantissa 1.75 on",
    "nearest-log2": "rounded to the nearest power of two by logarithm",
}  # fmt: skip


def exponent_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of a recipe whose scales are of E8M0, the most plausible first."""
    for change in ({"scale_rounding"}, {"block_scale"}, {"scale_rounding", "block_scale"}):
        for rounding in get_args(ScaleRounding):
            for form in get_args(BlockScale):
                differs = {
                    name for name, value in (("scale_rounding", rounding), ("block_scale", form))
                    if getattr(recipe, name) != value
                }  # fmt: skip
                if differs != change or rounding not in _WORDS or form not in _FORMS:
                    continue
                cause = f"exponent:{rounding}" if "scale_rounding" in change else f"scale-order:{form}"
                sentence = f"scales: {form}, {_WORDS[rounding]}"
                changed = replace(recipe, scale_rounding=rounding, block_scale=form)
                yield QuantizeDeviation(cause, sentence, _SCALES, recipe=changed)
    for cause, words, codes in (
        ("exponent:nearest", "rounded to the nearest power of two, as a cast does", _nearest),
        ("exponent:by-logarithm", "rounded up by a logarithm of float32", _by_logarithm),
        ("exponent-power-of-two", "a power of two is rounded up to the next one", partial(_above, 0.0)),
        (
            "exponent-power-of-two",
            "a power of two from 2^-126 on is rounded up to the next one",
            partial(_above, 2.0**-126),
        ),
    ):
        yield QuantizeDeviation(
            cause, f"scales: {words}", _SCALES,
            hooks={"scales": partial(_by, codes)}, odd=True,
        )  # fmt: skip
    for step, words in ((1, "larger"), (-1, "smaller")):
        yield QuantizeDeviation(
            f"exponent:{step:+}", f"scales: the exponent is 1 {words}", _SCALES,
            hooks={"scales": partial(_moved, step)}, odd=True,
        )  # fmt: skip


_FORMS = ("amax*(1/max)", "amax/max", "amax*2^-emax")


def _unrounded(run: Run) -> torch.Tensor:
    """The number that is rounded to a power of two."""
    if run.recipe.block_scale == "amax*2^-emax":
        exponent = torch.frexp(torch.tensor(run.recipe.element.max)).exponent - 1
        return torch.ldexp(run.blocks, -exponent.to(run.blocks.device))
    return run.blocks * (1.0 / run.recipe.element.max)


def _clamped(exponent: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    code = torch.where(value.isinf(), E8M0.max_code, exponent + E8M0.bias).clamp(0, E8M0.max_code)
    return torch.where(value.isnan(), E8M0.nan_code or 0, torch.where(value == 0, 0, code)).to(torch.uint8)


def _nearest(value: torch.Tensor, run: Run) -> torch.Tensor:
    """Ties to the even code: from mantissa 1.5 on up where the exponent is odd."""
    mantissa, exponent = torch.frexp(value)
    exponent = exponent - 1
    tie_up = (exponent + E8M0.bias) % 2 == 1
    return _clamped(exponent + ((mantissa > 0.75) | ((mantissa == 0.75) & tie_up)).int(), value)


def _by_logarithm(value: torch.Tensor, run: Run) -> torch.Tensor:
    logarithm = torch.log2(torch.where((value > 0) & value.isfinite(), value, 1.0))
    return _clamped(logarithm.ceil().int(), value)


def _above(least: float, value: torch.Tensor, run: Run) -> torch.Tensor:
    """The exponent and 1, whatever the mantissa, from `least` on."""
    right = exponent_codes(run.blocks, run.recipe)
    mantissa, exponent = torch.frexp(value)
    return torch.where((mantissa == 0.5) & (value > 0) & (value >= least), _clamped(exponent, value), right)


def _by(codes: Callable[[torch.Tensor, Run], torch.Tensor], run: Run) -> torch.Tensor:
    return codes(_unrounded(run), run)


def _moved(step: int, run: Run) -> torch.Tensor:
    codes = Run(run.evidence).stage("scales")
    moved = (codes.int() + step).clamp(0, E8M0.max_code).to(torch.uint8)
    return torch.where(codes == (E8M0.nan_code or 0), codes, moved)


def single_codes(found: Sequence[Evidence], expected: Sequence[torch.Tensor]) -> Iterator[QuantizeDeviation]:
    """Where all wrong scales should have one code of 0, 254 and 255, and have one other: what it is given instead.

    `expected`: the reference's scales of each of `found`.
    """
    if not found or found[0].subject.recipe.scale is not E8M0:
        return
    right = torch.cat([codes.flatten() for codes in expected])
    given = torch.cat([each.shown["scales"].flatten() for each in found])
    wrong = right != given
    wanted, instead = (torch.unique(codes[wrong]) for codes in (right, given))
    if len(wanted) != 1 or len(instead) != 1 or int(wanted) not in (0, E8M0.max_code, E8M0.nan_code):
        return
    code, other = int(wanted), int(instead)
    kinds: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
        (f"code {other} in place of {code}", lambda amax: torch.ones_like(amax, dtype=torch.bool)),
        (f"code {other} for blocks of zeros", lambda amax: amax == 0),
        (f"code {other} in place of {code}, but not for zeros", lambda amax: amax != 0),
        (f"code {other} for an infinite amax", torch.isinf),
    )
    for words, kind in kinds:

        def stored(run: Run, kind: Callable[[torch.Tensor], torch.Tensor] = kind) -> torch.Tensor:
            codes = Run(run.evidence).stage("scales")
            return codes.masked_fill((codes == code) & kind(run.blocks), other)

        yield QuantizeDeviation(f"exponent-code-{code}", f"scales: {words}", _SCALES, hooks={"scales": stored})
