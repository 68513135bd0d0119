"""Deviations that a recipe can say: another choice in one of its fields, or those of another library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from functools import lru_cache
from itertools import product
from typing import Any, get_args

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation
from narrowgauge.spec.dialects import DIALECTS, MX_DIALECTS
from narrowgauge.spec.formats import E2M3, E3M2, E4M3, E5M2, E8M0, FP32
from narrowgauge.spec.recipe import (
    Alpha,
    BlockScale,
    Candidates,
    Decode,
    Element,
    LargestScale,
    Rounding,
    ScaleRounding,
    SmallestScale,
    Statistics,
    TensorLimit,
    TensorScale,
    ZeroBlock,
    ZeroScale,
)
from narrowgauge.spec.recipes import DEFAULT_DIALECT, Recipe, find_recipe

_AFTER_AMAX = frozenset({"tensor scale", "scales", "codes"})
_SCALES = frozenset({"scales"})
_CODES = frozenset({"codes"})
_ALL = frozenset({"amax", "tensor scale", "scales", "codes"})
# Field, its values, the stages that it changes, the cause and the sentence, in which {} is the value.
_FIELDS: tuple[tuple[str, Any, frozenset[str], str, str], ...] = (
    ("zero_scale", ZeroScale, _CODES, "zero-scale:{}", "elements: a block whose scale is 0 gets {}"),
    ("element_scale", Element, _CODES, "element-order:{}", "elements: scaled as {}"),
    ("block_scale", BlockScale, _SCALES, "scale-order:{}", "scales: made as {}"),
    ("scale_rounding", ScaleRounding, _SCALES, "exponent:{}", "scales: rounded {}"),
    ("tensor_scale", TensorScale, _AFTER_AMAX, "tensor-scale-order:{}", "the scale of the tensor is {}"),
    ("tensor_limit", TensorLimit, _AFTER_AMAX, "tensor-limit:{}", "the scale of the tensor at its limits: {}"),
    ("zero_block", ZeroBlock, _SCALES, "zero-block:{}", "scales: a scale of 0 becomes {}"),
    ("smallest_scale", SmallestScale, _SCALES, "smallest-scale:{}", "scales: none is below {}"),
    ("rounding", Rounding, _CODES, "rounding:{}", "elements: rounded {}"),
    ("candidates", Candidates, _SCALES, "candidates:{}", "scales: candidates are {}"),
    ("largest_scale", LargestScale, _SCALES, "largest-scale:{}", "scales: the largest is that of {}"),
    ("statistics", Statistics, _AFTER_AMAX, "statistics:{}", "amaxes are used in the dtype {}"),
)
# Names of a choice that say more than its field and value.
_NAMED = {
    ("tensor_limit", "none"): ("tensor-scale-not-clamped", "the scale of the tensor is not limited"),
    ("rounding", "nearest-even-wrapping"): ("rounding:nearest-even-wrapping", "elements: what is too large wraps"),
    ("scale_rounding", "nearest-even"): ("scale-ties-even", "scales: ties round to even"),
    ("scale_rounding", "none"): ("exponent:none", "scales: not rounded to a power of two"),
    ("scale_rounding", "down"): ("exponent:down", "scales: rounded down to a power of two"),
}
_ELSEWHERE = ("stochastic", "nearest-toward-zero", "refuse")
"""Roundings that others have, under a name of their own; and a limit that gives no scale."""
_OF_QUANTIZING = tuple(each.name for each in fields(Recipe) if each.name not in ("dialect", "decode", "alpha"))
_CLAMPED = ("x*min(1/(s*(1/enc)),FLT_MAX)", "x*(1/(s*(1/enc)))")
_MEASURE = ("four-over-six-other-measure", "4over6: errors are {}, not {}")


@lru_cache(maxsize=256)
def chosen_deviations(recipe: Recipe) -> tuple[QuantizeDeviation, ...]:
    """Every choice of another value in a field, where the recipe stays one; then other formats."""
    return (*_fields(recipe), *_numbers(recipe))


def _fields(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    for field, values, stages, cause, sentence in _FIELDS:
        if recipe.scale is E8M0 and field in ("block_scale", "scale_rounding"):
            continue  # `exponents` has them, together too
        if recipe.tensor_scale in ("none", "given") and field in ("tensor_scale", "tensor_limit"):
            continue  # nothing is made of an amax
        for value in get_args(values):
            if value in (getattr(recipe, field), *_ELSEWHERE) or (field, recipe.rounding) == ("rounding", "stochastic"):
                continue
            named = _NAMED.get((field, value), (cause.format(value), sentence.format(value)))
            if field == "candidates" and "6" not in (value, recipe.candidates):
                named = _MEASURE[0], _MEASURE[1].format(*(w[-3:] for w in (value, recipe.candidates)))
            for variant in _recipes(recipe, field, value):
                if (recipe.element_scale, variant.element_scale) == _CLAMPED:  # the same order of operations
                    named = (
                        f"zero-scale:{variant.zero_scale}",
                        f"elements: a scale of 0 is taken for {variant.zero_scale}",
                    )
                # FP8 may scale elements by the encode scale itself, or by the inverse that it stores.
                later = _CODES if recipe.scale is FP32 and stages == _SCALES and not recipe.whole else frozenset()
                changed = _AFTER_AMAX if field == "scale_rounding" and recipe.whole else stages
                yield QuantizeDeviation(*named, changed, recipe=variant, lenient=later)


def _recipes(recipe: Recipe, field: str, value: str) -> list[Recipe]:
    """The recipe with one choice made otherwise, and with what that choice needs: one of several, or none."""
    with suppress(ValueError):
        return [replace(recipe, **{field: value})]  # type: ignore[arg-type]
    found = []
    if field == "element_scale":
        for zeros in get_args(ZeroScale):
            with suppress(ValueError):
                found.append(replace(recipe, element_scale=value, zero_scale=zeros))  # type: ignore[arg-type]
    if field == "tensor_scale":  # how it is used again is no matter of quantizing
        for decode, alpha in product(get_args(Decode), get_args(Alpha)):
            with suppress(ValueError):
                return [replace(recipe, tensor_scale=value, decode=decode, alpha=alpha)]  # type: ignore[arg-type]
    return found


def _numbers(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Fields that hold numbers and formats."""
    if recipe.scale is E4M3 and recipe.tensor_scale != "none":
        other = 256.0 if recipe.scale_max == 448.0 else 448.0
        changed = replace(recipe, scale_max=other)
        for stages in (_AFTER_AMAX, frozenset({"tensor scale"})):  # the errors of 4over6 have that number too
            yield QuantizeDeviation(
                f"scale-max-{other:g}", f"the largest scale is mapped to {other:g}", stages, recipe=changed
            )
    if recipe.smallest_amax:
        yield QuantizeDeviation(
            "epsilon-ignored", f"amaxes are not raised to {recipe.smallest_amax:g}", _AFTER_AMAX,
            recipe=replace(recipe, smallest_amax=0.0),
        )  # fmt: skip
    elif recipe.scale is FP32 and recipe.tensor_scale != "given":
        yield QuantizeDeviation(
            "epsilon-unwanted", "amaxes are raised to 1e-12", _AFTER_AMAX, recipe=replace(recipe, smallest_amax=1e-12)
        )
    for one, other_format in ((E4M3, E5M2), (E2M3, E3M2)):
        if recipe.element in (one, other_format):
            element = other_format if recipe.element is one else one
            code = element.max_code if element.nan_code is None else element.nan_code
            yield QuantizeDeviation(
                f"element-format:{element.name}", f"elements: coded as {element.name}", _CODES,
                recipe=replace(recipe, element=element, nan_code=code),  # type: ignore[arg-type]
            )  # fmt: skip
            yield QuantizeDeviation(
                f"element-format:{element.name}", f"elements: quantized as {element.name}", _AFTER_AMAX,
                recipe=replace(recipe, element=element, nan_code=code),  # type: ignore[arg-type]
            )  # fmt: skip


@lru_cache(maxsize=256)
def dialect_deviations(recipe: Recipe) -> tuple[QuantizeDeviation, ...]:
    """The recipe in every other dialect that it has."""
    return tuple(_dialects(recipe))


def _dialects(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    known = DIALECTS if recipe.scale is E4M3 else MX_DIALECTS if recipe.scale is E8M0 else {}
    for dialect in known:
        if dialect == recipe.dialect:
            continue
        name = recipe.name if dialect == DEFAULT_DIALECT else f"{recipe.name}@{dialect}"
        with suppress(ValueError):
            changed = find_recipe(name)
            if all(getattr(changed, name) == getattr(recipe, name) for name in _OF_QUANTIZING):
                continue  # that one differs in what is done with a quantized matrix
            words = f"the choices of dialect {dialect}, in place of {recipe.dialect}"
            yield QuantizeDeviation(f"dialect:{dialect}", words, _ALL, recipe=changed)
