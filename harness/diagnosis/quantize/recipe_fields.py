"""Deviations by a changed recipe: a different choice in a field of the recipe, or the choices of another library."""

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
# Field, its type, the stages that it changes, the cause and the sentence. {} is the value of the field.
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
# Causes and sentences of choices that have a name of their own.
_VALUE_CAUSES = {
    ("tensor_limit", "none"): ("tensor-scale-not-clamped", "the scale of the tensor is not limited"),
    ("rounding", "nearest-even-wrapping"): ("rounding:nearest-even-wrapping", "elements: what is too large wraps"),
    ("scale_rounding", "nearest-even"): ("scale-ties-even", "scales: ties round to even"),
    ("scale_rounding", "none"): ("exponent:none", "scales: not rounded to a power of two"),
    ("scale_rounding", "down"): ("exponent:down", "scales: rounded down to a power of two"),
}
_SKIPPED_VALUES = ("stochastic", "nearest-toward-zero", "nearest-away", "refuse", "given")
"""Values without a deviation here: roundings with deviations in other modules, a limit that gives no scale, and a scale
that only a caller has."""
_QUANTIZE_FIELDS = tuple(field.name for field in fields(Recipe) if field.name not in ("dialect", "decode", "alpha"))
_UNCLAMPED_FACTOR = ("x*min(1/(s*(1/enc)),FLT_MAX)", "x*(1/(s*(1/enc)))")
_ERROR_MEASURE = ("four-over-six-other-measure", "4over6: errors are {}, not {}")


@lru_cache(maxsize=256)
def field_deviations(recipe: Recipe) -> tuple[QuantizeDeviation, ...]:
    """Every other value of a field, if the changed recipe is valid; then other numbers and formats."""
    return (*_choice_deviations(recipe), *_number_deviations(recipe))


def _choice_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    for field, values, stages, cause, sentence in _FIELDS:
        if recipe.scale is E8M0 and field in ("block_scale", "scale_rounding"):
            continue  # `e8m0_exponents` changes both fields, alone and together
        if recipe.tensor_scale in ("none", "given") and field in ("tensor_scale", "tensor_limit"):
            continue  # the recipe computes no tensor scale from an amax
        for value in get_args(values):
            if value in (getattr(recipe, field), *_SKIPPED_VALUES):
                continue
            if (field, recipe.rounding) == ("rounding", "stochastic"):
                continue
            cause_and_sentence = _VALUE_CAUSES.get((field, value), (cause.format(value), sentence.format(value)))
            if field == "candidates" and "6" not in (value, recipe.candidates):
                measures = (value[-3:], recipe.candidates[-3:])
                cause_and_sentence = _ERROR_MEASURE[0], _ERROR_MEASURE[1].format(*measures)
            for variant in _variants(recipe, field, value):
                if (recipe.element_scale, variant.element_scale) == _UNCLAMPED_FACTOR:  # equal except for a scale of 0
                    cause_and_sentence = (
                        f"zero-scale:{variant.zero_scale}",
                        f"elements: a scale of 0 is taken for {variant.zero_scale}",
                    )
                # FP8 kernels scale elements either by the encode scale or by the stored inverse of it.
                optional = _CODES if recipe.scale is FP32 and stages == _SCALES and not recipe.whole else frozenset()
                changed_stages = _AFTER_AMAX if field == "scale_rounding" and recipe.whole else stages
                yield QuantizeDeviation(*cause_and_sentence, changed_stages, recipe=variant, optional_stages=optional)


def _variants(recipe: Recipe, field: str, value: str) -> list[Recipe]:
    """Valid recipes with this value of the field. Dependent fields are changed if the recipe is invalid without it."""
    with suppress(ValueError):
        return [replace(recipe, **{field: value})]  # type: ignore[arg-type]
    variants = []
    if field == "element_scale":
        for zero_scale in get_args(ZeroScale):
            with suppress(ValueError):
                variants.append(replace(recipe, element_scale=value, zero_scale=zero_scale))  # type: ignore[arg-type]
    if field == "tensor_scale":  # quantizing does not depend on `decode` and `alpha`
        for decode, alpha in product(get_args(Decode), get_args(Alpha)):
            with suppress(ValueError):
                return [replace(recipe, tensor_scale=value, decode=decode, alpha=alpha)]  # type: ignore[arg-type]
    return variants


def _number_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Other values of fields with numbers and formats."""
    if recipe.scale is E4M3 and recipe.tensor_scale != "none":
        scale_max = 256.0 if recipe.scale_max == 448.0 else 448.0
        changed = replace(recipe, scale_max=scale_max)
        for stages in (_AFTER_AMAX, frozenset({"tensor scale"})):  # the errors of 4over6 depend on scale_max too
            yield QuantizeDeviation(
                f"scale-max-{scale_max:g}", f"the largest scale is mapped to {scale_max:g}", stages, recipe=changed
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
    for first_format, second_format in ((E4M3, E5M2), (E2M3, E3M2)):
        if recipe.element in (first_format, second_format):
            element = second_format if recipe.element is first_format else first_format
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
    """The recipe in each further dialect."""
    return tuple(_dialect_deviations(recipe))


def _dialect_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    dialects = DIALECTS if recipe.scale is E4M3 else MX_DIALECTS if recipe.scale is E8M0 else {}
    for dialect in dialects:
        if dialect == recipe.dialect:
            continue
        name = recipe.name if dialect == DEFAULT_DIALECT else f"{recipe.name}@{dialect}"
        with suppress(ValueError):
            changed = find_recipe(name)
            if all(getattr(changed, field) == getattr(recipe, field) for field in _QUANTIZE_FIELDS):
                continue  # the dialects differ only in operations on quantized matrices
            sentence = f"the choices of dialect {dialect}, in place of {recipe.dialect}"
            yield QuantizeDeviation(f"dialect:{dialect}", sentence, _ALL, recipe=changed)
