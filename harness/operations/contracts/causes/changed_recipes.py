"""Known mistakes of the step `quantize`: changed choices of its recipe, wrong amaxes, roundings and stored scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any

from narrowgauge.contract import steps as c
from narrowgauge.contract.values import Value
from narrowgauge.harness.operations.contracts.causes.edits import Site, other_rows
from narrowgauge.reference.contracts.changed_steps import OTHER_BITS, OTHER_SCALES, ROUNDINGS, OtherRow
from narrowgauge.reference.contracts.quantized import problem
from narrowgauge.spec.formats import E8M0, FP32, Format
from narrowgauge.spec.program import QUANTIZE, TRANSPOSED, Axes, Step
from narrowgauge.spec.recipe import Recipe, field_choices
from narrowgauge.spec.recipes import find_recipe, recipes

Quantization = tuple[str, str, Callable[[Site], Value | None]]
"""Name, sentence and edit."""
_SENTENCES = {
    "rounding": "elements are rounded {}", "block_scale": "scales are {}", "scale_rounding": "scales are rounded {}",
    "element_scale": "elements are scaled as {}", "negative_zero": "the rule for −0 is {}",
    "tensor_scale": "the scale of the tensor is {}", "tensor_limit": "the scale of the tensor at its limits is {}",
    "zero_block": "a scale of 0 becomes {}", "smallest_scale": "no scale is below {}",
    "zero_scale": "a block whose scale is 0 gets {}", "statistics": "amaxes are used in the dtype {}",
    "largest_scale": "the largest scale is that of {}", "packing": "the two codes of a byte are stored {}",
    "nan": "NaN in amaxes: {}", "nan_code": "NaN becomes the code {:#x}",
}  # fmt: skip
_EPSILONS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-5)
_LARGEST = (2.0, 3.0, 4.0, 6.0, 8.0, 127.0, 128.0, 224.0, 240.0, 256.0, 384.0, 416.0, 448.0, 480.0, 49152.0, 57344.0)
_UNSEEN = ("name", "dialect", "decode", "alpha", "columnwise", "delayed")


def changed_quantizations(site: Site) -> Iterator[Quantization]:
    """All changes of a quantization."""
    recipe = find_recipe(site.step.recipe or "")
    for name, sentence, other in _changed_recipes(recipe):
        yield name, sentence, partial(_with_options, recipe=other)
    for rounding in ROUNDINGS:
        yield rounding.replace(" ", "-"), f"elements are rounded {rounding}", partial(_with_options, rounding=rounding)
    if site.step.random is not None:
        for name, (sentence, _) in OTHER_BITS.items():
            yield f"bits-{name}", sentence, partial(_with_options, bits=name)
        for row, name, phrase in other_rows(site.step.axes):
            yield f"bits-of-{name}", f"the random bits are those of {phrase}", partial(_bits_of_row, row)
    for dtype in dict.fromkeys((site.a.dtype, "float32")) if _other_orientation(site) is not None else ():
        sentence = f"it is made of the decoded values of the other orientation, in {dtype}"
        yield f"twice-{dtype}", sentence, partial(_twice, dtype)
    yield "signs-lost", "the signs of the elements are lost", lambda s: _of(s, abs(s.a))
    if recipe.tensor_scale == "given":
        for name, (sentence, _) in OTHER_SCALES.items():
            yield f"scale-{name}", sentence, partial(_with_options, given=name)
    if recipe.tensor_scale == "given" and recipe.scale is FP32:
        return
    stored = (recipe, *(other for name, _, other in _changed_recipes(recipe) if name.startswith("block_scale")))
    if recipe.scale in (FP32, E8M0):
        for number, other in enumerate(stored):
            edit = partial(_with_options, recipe=other, view="inverse scales")
            yield f"inverse-scales-{number}", f"the inverse of each scale is stored{_rule(recipe, other)}", edit
    yield from _other_amaxes(recipe, site.step.axes)


def _rule(recipe: Recipe, other: Recipe) -> str:
    return "" if other is recipe else f", and scales are {other.block_scale}"


def _with_options(site: Site, **options: Any) -> Value:
    return site.changed(**options)


def _other_orientation(site: Site) -> Value | None:
    """The quantization of the same matrix in the other orientation, if that one is neither rotated nor random."""
    steps, own = site.editor.program.steps, _matrix_of(site.editor.program.steps, site.number)
    for number, step in enumerate(steps):
        plain = step.function == QUANTIZE and step.random is None and find_recipe(step.recipe or "").transform is None
        if plain and _matrix_of(steps, number) == (own[0], not own[1]):
            return Value(site.editor, number)
    return None


def _matrix_of(steps: Sequence[Step], number: int) -> tuple[int, bool]:
    """The matrix that a step quantizes, and whether it quantizes the transpose."""
    operand = steps[number].operands[0]
    turned = steps[operand].function == TRANSPOSED
    return (steps[operand].operands[0] if turned else operand), turned


def _twice(dtype: str, site: Site) -> Value:
    other = _other_orientation(site)
    assert other is not None
    return _of(site, c.transposed(c.dequantize(other, dtype)))


def _of(site: Site, x: Value, statistics: Value | None = None) -> Value:
    """The quantization of a second matrix, with the amaxes of a third."""
    bits = site.operands[-1:] if site.step.random is not None else []
    operands = (x, *site.operands[1:]) if statistics is None else (x, statistics, *bits)
    options = {**site.step.options, **({} if statistics is None else {"statistics": True})}
    return site.editor.add(site.step.function, operands, site.step.axes, x.dtype, **options)


@lru_cache(maxsize=64)
def _changed_recipes(recipe: Recipe) -> tuple[tuple[str, str, Recipe], ...]:
    """Recipes with a changed choice, and the recipes of libraries for the same layout."""
    found: dict[Any, tuple[str, str, Recipe]] = {_key(recipe): ("", "", recipe)}
    for name, sentence, other in (*_other_fields(recipe), *_other_names(recipe)):
        if problem(other) is None and (other.rounding == "stochastic") <= (recipe.rounding == "stochastic"):
            found.setdefault(_key(other), (name, sentence, other))
    return tuple(found.values())[1:]


def _key(recipe: Recipe) -> tuple[Any, ...]:
    """The choices with an influence on codes and scales; a rotation is a step of its own."""
    rule = recipe.rowwise
    return tuple(getattr(rule, field.name) for field in fields(rule) if field.name not in _UNSEEN)


def _other_fields(recipe: Recipe) -> Iterator[tuple[str, str, Recipe]]:
    for field, sentence in _SENTENCES.items():
        without = field in ("tensor_scale", "tensor_limit") and recipe.tensor_scale in ("none", "given")
        for value in () if without else field_choices()[field]:
            if value in ("given", "refuse"):
                continue
            with suppress(ValueError):
                yield f"{field}:{value}", sentence.format(value), replace(recipe, **{field: value})
                continue
            for zero_scale in field_choices()["zero_scale"] if field == "element_scale" else ():
                with suppress(ValueError):
                    other = replace(recipe, **{field: value, "zero_scale": zero_scale})
                    yield f"{field}:{value}:{zero_scale}", sentence.format(value), other
    for epsilon in _EPSILONS:
        with suppress(ValueError):
            yield f"epsilon:{epsilon:g}", f"amaxes are at least {epsilon:g}", replace(recipe, smallest_amax=epsilon)
    for number in (256.0, 448.0):
        with suppress(ValueError):
            yield f"scale-max:{number:g}", f"the largest scale is {number:g}", replace(recipe, scale_max=number)
    for number in _LARGEST:
        if (code := _code(recipe.element, number)) is not None:
            sentence = f"the largest element is {number:g} in place of {recipe.element.max:g}"
            with suppress(ValueError):
                yield f"max:{number:g}", sentence, replace(recipe, element=replace(recipe.element, max_code=code))


def _code(fmt: Format, number: float) -> int | None:
    return next((code for code in range(1, fmt.max_code) if fmt.value(code) == number), None)


def _other_names(recipe: Recipe) -> Iterator[tuple[str, str, Recipe]]:
    layout = ("element", "block", "scale", "granularity")
    for other in recipes():
        same = all(getattr(other, field) == getattr(recipe, field) for field in layout)
        same &= recipe.rounding != "stochastic" or other.rounding == recipe.rounding
        if same and (other.tensor_scale == "given") == (recipe.tensor_scale == "given"):
            yield f"recipe:{other}", f"the recipe is {other}", other


def _other_amaxes(recipe: Recipe, axes: Axes) -> Iterator[Quantization]:
    """Scales from amaxes of a wrong tensor."""

    def amaxes(name: str, phrase: str, of: Callable[[Site, Value], Value | None]) -> Quantization:
        def edit(site: Site) -> Value | None:
            statistics = of(site, site.a)
            return None if statistics is None else _of(site, site.a, statistics)

        return f"amax-{name}", f"the amaxes are those of {phrase}", edit

    def before_cast(site: Site, x: Value) -> Value | None:
        return c.float32(Value(site.editor, x.step.operands[0])) if x.step.function == "cast" else None

    def codes_before_cast(site: Site) -> Value | None:
        x = before_cast(site, site.a)
        return None if x is None else _of(site, x, site.a)

    yield amaxes("before-cast", "the elements before they are rounded to the dtype", before_cast)
    codes = "the codes are those of the elements before they are rounded to the dtype"
    yield "codes-before-cast", codes, codes_before_cast
    yield amaxes("signed", "positive elements alone", lambda s, x: c.maximum(c.float32(x), 0.0))
    for dtype in ("bfloat16", "float16"):
        yield amaxes(f"in-{dtype}", f"the elements rounded to {dtype}", partial(_cast_of, dtype))
    block = None if recipe.spans_k else recipe.block[1]
    if block is not None:
        yield amaxes("row", "whole rows", lambda s, x: s.made("expanded", c.amax(x), x))
        for columns, name in ((block, "next"), (-block, "previous")):
            yield amaxes(f"{name}-block", f"the {name} block", partial(_rolled, columns))
    if not recipe.whole:
        yield amaxes("tensor", "the tensor", lambda s, x: s.made("amax_of_all", x))
        for row, name, phrase in other_rows(axes):
            yield f"amax-row-{name}", f"the amaxes are those of {phrase}", partial(_amax_of_row, row)
    whole = "a row" if block is None else "a block"
    some: tuple[tuple[str, str, tuple[float, float | None, int]], ...] = (
        ("first-half", f"the first half of {whole}", (0, 0.5, 1)),
        *((f"without-last-{n}", f"all but the last {n} elements of {whole}", (0, -n, 1)) for n in (1, 8, 16)),
        ("without-first", f"all but the first element of {whole}", (1, None, 1)),
        ("even", f"every second element of {whole}", (0, None, 2)),
    )
    for name, phrase, columns_ in some:
        yield amaxes(name, phrase, partial(_kept, columns_, block))


def _cast_of(dtype: str, site: Site, x: Value) -> Value | None:
    return None if x.dtype == dtype else site.made("cast", x, dtype=dtype)


def _rolled(columns: int, site: Site, x: Value) -> Value:
    return site.made("rolled", x, columns=columns)


def _kept(columns: tuple[float, float | None, int], period: int | None, site: Site, x: Value) -> Value:
    return site.made("kept", x, columns=columns, period=period)


def _bits_of_row(row: OtherRow, site: Site) -> Value:
    *operands, bits = site.operands
    other = Site(site.editor, bits.number).in_row(row)
    return site.editor.add(site.step.function, (*operands, other), site.step.axes, site.dtype, **site.step.options)


def _amax_of_row(row: OtherRow, site: Site) -> Value:
    return _of(site, site.a, Site(site.editor, site.a.number).in_row(row))
