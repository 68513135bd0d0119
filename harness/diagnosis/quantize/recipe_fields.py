"""Deviations by a changed recipe: a different choice in a field of the recipe, or the choices of another library."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from functools import lru_cache
from itertools import product
from typing import Any, get_args

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.spec.dialects import DIALECTS, FP8_DIALECTS, MX_DIALECTS
from narrowgauge.spec.formats import E2M3, E3M2, E4M3, E5M2, E8M0, FP32, Format
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


def _changed(recipe: Recipe, _: Any) -> Recipe:
    return recipe


def _field(cause: str, sentence: str, stages: frozenset[str]) -> QuantizeDeviation:
    """Another choice in a field of the recipe. {} is the value of the field."""
    return Deviation(cause, sentence, "recipe", _changed, stages=stages)


FIELDS: tuple[tuple[str, Any, QuantizeDeviation], ...] = (
    ("zero_scale", ZeroScale, _field("zero-scale:{}", "elements: a block whose scale is 0 gets {}", _CODES)),
    ("element_scale", Element, _field("element-order:{}", "elements: scaled as {}", _CODES)),
    ("block_scale", BlockScale, _field("scale-order:{}", "scales: made as {}", _SCALES)),
    ("scale_rounding", ScaleRounding, _field("exponent:{}", "scales: rounded {}", _SCALES)),
    ("tensor_scale", TensorScale, _field("tensor-scale-order:{}", "the scale of the tensor is {}", _AFTER_AMAX)),
    ("tensor_limit", TensorLimit,
     _field("tensor-limit:{}", "the scale of the tensor at its limits: {}", _AFTER_AMAX)),
    ("zero_block", ZeroBlock, _field("zero-block:{}", "scales: a scale of 0 becomes {}", _SCALES)),
    ("smallest_scale", SmallestScale, _field("smallest-scale:{}", "scales: none is below {}", _SCALES)),
    ("rounding", Rounding, _field("rounding:{}", "elements: rounded {}", _CODES)),
    ("candidates", Candidates, _field("candidates:{}", "scales: candidates are {}", _SCALES)),
    ("largest_scale", LargestScale, _field("largest-scale:{}", "scales: the largest is that of {}", _SCALES)),
    ("statistics", Statistics, _field("statistics:{}", "amaxes are used in the dtype {}", _AFTER_AMAX)),
)  # fmt: skip
"""Field, its type, and the deviation with another value."""
NAMED_CHOICES: dict[tuple[str, str], QuantizeDeviation] = {
    ("tensor_limit", "none"): _field("tensor-scale-not-clamped", "the scale of the tensor is not limited", _AFTER_AMAX),
    ("rounding", "nearest-even-wrapping"): _field("rounding:{}", "elements: what is too large wraps", _CODES),
    ("scale_rounding", "nearest-even"): _field("scale-ties-even", "scales: ties round to even", _SCALES),
    ("scale_rounding", "none"): _field("exponent:{}", "scales: not rounded to a power of two", _SCALES),
    ("scale_rounding", "down"): _field("exponent:{}", "scales: rounded down to a power of two", _SCALES),
}
"""Choices with a cause or sentence of their own."""
OTHER_MEASURE = _field("four-over-six-other-measure", "4over6: errors are {0[0]}, not {0[1]}", _SCALES)
ZERO_SCALE = _field("zero-scale:{}", "elements: a scale of 0 is taken for {}", _CODES)
_SKIPPED_VALUES = ("stochastic", "nearest-toward-zero", "nearest-away", "refuse", "given")
"""Values without a deviation here: roundings with deviations in other modules, a limit that gives no scale, and a scale
that only a caller has."""
_QUANTIZE_FIELDS = tuple(
    field.name for field in fields(Recipe) if field.name not in ("name", "dialect", "decode", "alpha", "packing")
)
EPSILONS = (448e-30, 1e-12, 1e-10, 1e-8, 448e-10, 1e-6, 1e-5, 1e-4, 2.0**-9)
"""Lower clamps of amaxes in libraries."""
_UNCLAMPED_FACTOR = ("x*min(1/(s*(1/enc)),FLT_MAX)", "x*(1/(s*(1/enc)))")


@lru_cache(maxsize=256)
def field_deviations(recipe: Recipe) -> tuple[QuantizeDeviation, ...]:
    """Every other value of a field, if the changed recipe is valid; then other numbers and formats.

    The sentence has the name of the FP8 recipe with this change alone.
    """
    names = {_choices(other): name for name, other in fp8_recipes(recipe)}
    return tuple(
        replace(row, sentence=f"{row.sentence}, as recipe {name} does") if name is not None else row
        for row in (*_choice_deviations(recipe), *rows_of(NUMBERS, recipe))
        for name in [names.get(_choices(changed_recipe(row)))]
    )


def changed_recipe(row: QuantizeDeviation) -> Recipe:
    """The recipe of a row that is bound to it."""
    recipe: Recipe = row.change.args[0]  # type: ignore[union-attr]
    return recipe


def _choices(recipe: Recipe) -> tuple[Any, ...]:
    """Everything that decides the bytes of `quantize`."""
    return tuple(getattr(recipe, name) for name in _QUANTIZE_FIELDS)


def _choice_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    for field, values, usual in FIELDS:
        if recipe.scale is E8M0 and field in ("block_scale", "scale_rounding"):
            continue  # `e8m0_exponents` changes both fields, alone and together
        if recipe.tensor_scale in ("none", "given") and field in ("tensor_scale", "tensor_limit"):
            continue  # the recipe computes no tensor scale from an amax
        for value in get_args(values):
            if value in (getattr(recipe, field), *_SKIPPED_VALUES):
                continue
            if (field, recipe.rounding) == ("rounding", "stochastic"):
                continue
            row, name = NAMED_CHOICES.get((field, value), usual), value
            if field == "candidates" and "6" not in (value, recipe.candidates):
                row, name = OTHER_MEASURE, (value[-3:], recipe.candidates[-3:])
            for variant in variants(recipe, field, value):
                if (recipe.element_scale, variant.element_scale) == _UNCLAMPED_FACTOR:  # equal except for a scale of 0
                    row, name = ZERO_SCALE, variant.zero_scale
                stages = usual.stages
                # FP8 kernels scale elements either by the encode scale or by the stored inverse of it.
                optional = _CODES if recipe.scale is FP32 and stages == _SCALES and not recipe.whole else frozenset()
                changed_stages = _AFTER_AMAX if field == "scale_rounding" and recipe.whole else stages
                yield replace(row.bound(name, variant), stages=changed_stages, optional_stages=optional)


def variants(recipe: Recipe, field: str, value: Any) -> list[Recipe]:
    """Valid recipes with this value of the field. Dependent fields are changed if the recipe is invalid without it."""
    with suppress(ValueError):
        return [replace(recipe, **{field: value})]
    variants = []
    if field == "element_scale":
        for zero_scale in get_args(ZeroScale):
            with suppress(ValueError):
                variants.append(replace(recipe, element_scale=value, zero_scale=zero_scale))
    if field == "tensor_scale":  # quantizing does not depend on `decode` and `alpha`
        for decode, alpha in product(get_args(Decode), get_args(Alpha)):
            with suppress(ValueError):
                return [replace(recipe, tensor_scale=value, decode=decode, alpha=alpha)]
    return variants


def _other_scale_max(recipe: Recipe) -> dict[str, Recipe]:
    if recipe.scale is not E4M3 or recipe.tensor_scale == "none":
        return {}
    scale_max = 256.0 if recipe.scale_max == 448.0 else 448.0
    return {f"{scale_max:g}": replace(recipe, scale_max=scale_max)}


def _without_epsilon(recipe: Recipe) -> dict[str, Recipe]:
    return {f"{recipe.smallest_amax:g}": replace(recipe, smallest_amax=0.0)} if recipe.smallest_amax else {}


def _with_epsilon(recipe: Recipe) -> dict[str, Recipe]:
    if recipe.scale is not FP32 or recipe.tensor_scale == "given":
        return {}
    others = (epsilon for epsilon in EPSILONS if epsilon != recipe.smallest_amax)
    return {f"{epsilon:g}": replace(recipe, smallest_amax=epsilon) for epsilon in others}


def _other_format(recipe: Recipe) -> dict[str, Recipe]:
    others: dict[Format, Format] = {E4M3: E5M2, E5M2: E4M3, E2M3: E3M2, E3M2: E2M3}
    element = others.get(recipe.element)
    if element is None:
        return {}
    code = element.max_code if element.nan_code is None else element.nan_code
    return {element.name: replace(recipe, element=element, nan_code=code)}  # type: ignore[arg-type]


NUMBERS: tuple[QuantizeDeviation, ...] = (
    Deviation("scale-max-{}", "the largest scale is mapped to {}", "recipe", _changed, _other_scale_max,
              stages=_AFTER_AMAX),
    # The errors of 4over6 depend on scale_max too.
    Deviation("scale-max-{}", "the largest scale is mapped to {}", "recipe", _changed, _other_scale_max,
              stages=frozenset({"tensor scale"})),
    Deviation("epsilon-ignored", "amaxes are not raised to {}", "recipe", _changed, _without_epsilon,
              stages=_AFTER_AMAX),
    Deviation("epsilon-unwanted", "amaxes are raised to {}", "recipe", _changed, _with_epsilon, stages=_AFTER_AMAX),
    Deviation("element-format:{}", "elements: coded as {}", "recipe", _changed, _other_format, stages=_CODES),
    Deviation("element-format:{}", "elements: quantized as {}", "recipe", _changed, _other_format, stages=_AFTER_AMAX),
)  # fmt: skip
"""Other values of fields with numbers and formats."""


def _other_dialects(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """The recipe in each further dialect with another quantizer."""
    dialects = DIALECTS if recipe.scale is E4M3 else MX_DIALECTS if recipe.scale is E8M0 else {}
    for dialect in dialects:
        if dialect == recipe.dialect:
            continue
        name = recipe.name if dialect == DEFAULT_DIALECT else f"{recipe.name}@{dialect}"
        with suppress(ValueError):
            changed = find_recipe(name)
            if _choices(changed) != _choices(recipe):
                yield dialect, changed


def _other_fp8_recipes(recipe: Recipe) -> Iterable[tuple[str, Recipe]]:
    """FP8 recipes that differ from the recipe in several fields. `field_deviations` has the others."""
    return [(name, other) for name, other in fp8_recipes(recipe) if _count_changes(recipe, other) > 1]


def _count_changes(recipe: Recipe, other: Recipe) -> int:
    return sum(one != two for one, two in zip(_choices(recipe), _choices(other), strict=True))


@lru_cache(maxsize=64)
def fp8_recipes(recipe: Recipe) -> tuple[tuple[str, Recipe], ...]:
    """FP8 recipes of the same blocks and elements: other dialects, scales and epsilons, then with the other rule for
    NaN. Each is the first with its bytes, and none has the bytes of `recipe`. Empty for other scales than float32."""
    stem = re.sub(r"(-pow2|-fp32)?(-eps.*)?$", "", recipe.name)
    kind = next((part for part in FP8_DIALECTS if stem.startswith(f"fp8-{part}-")), "")
    if not kind:
        return ()
    roundings = {"block": ("-pow2", "-fp32"), "static": ("",)}.get(kind, ("", "-pow2"))
    epsilons = ("", *(f"-eps{epsilon!r}" for epsilon in EPSILONS if kind != "static"))
    found = {_choices(recipe): ("", recipe)}
    for epsilon, rounding, dialect in product(epsilons, roundings, FP8_DIALECTS[kind]):
        with suppress(ValueError):
            other = find_recipe(f"{stem}{rounding}{epsilon}@{dialect}")
            found.setdefault(_choices(other), (str(other), other))
    for name, other in list(found.values()):
        policy: Any = "propagate" if other.nan == "ignore" else "ignore"
        with suppress(ValueError):
            changed = replace(other, nan=policy)
            found.setdefault(_choices(changed), (f"{name or recipe} with nan {policy}", changed))
    return tuple(pair for pair in found.values() if pair[0])


DIALECT: QuantizeDeviation = Deviation(
    "dialect:{}", "the choices of dialect {}, in place of {of}", "recipe", _changed, _other_dialects, stages=_ALL
)
OTHER_RECIPE: QuantizeDeviation = Deviation(
    "recipe:{}", "the choices of recipe {}, in place of {of}", "recipe", _changed, _other_fp8_recipes, stages=_ALL
)


@lru_cache(maxsize=256)
def dialect_deviations(recipe: Recipe) -> tuple[QuantizeDeviation, ...]:
    """The recipe in each further dialect; FP8 recipes with several other choices."""
    return (
        *(replace(row, sentence=row.sentence.format(of=recipe.dialect)) for row in DIALECT.rows(recipe)),
        *(replace(row, sentence=row.sentence.format(of=recipe)) for row in OTHER_RECIPE.rows(recipe)),
    )
