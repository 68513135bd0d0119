"""Pairs of values of two keys of a case: a bug that needs two options is found only by a case that has both.

The values of a case are its keys but for the input family and repeated calls. A recipe counts as its traits (element,
block, rounding, …), a training recipe as its family and options, a size as its class (0, 1, a multiple of 128 or of 16,
another), sections as their kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.keys import keys_of
from narrowgauge.spec.recipes import find_recipe

_LEFT_OUT = ("inputs", "shape", "bands", "repeats", "concurrency")
_SIZES = (128, 16)

Value = tuple[str, str]
"""Key and value: ("bias", "True"), ("recipe.rounding", "stochastic"), ("K", "1")."""
Pair = tuple[Value, Value]


def size_class(size: int) -> str:
    """`0`, `1`, `128n`, `16n` or `other`."""
    if size < 2:
        return str(size)
    return next((f"{step}n" for step in _SIZES if size % step == 0), "other")


def recipe_traits(name: str) -> dict[str, str]:
    """What decides the path of a kernel for a recipe, by the names of its fields."""
    recipe = find_recipe(name)
    return {
        "element": recipe.element.name,
        "scale": recipe.scale.name,
        "block": "whole" if recipe.whole else "row" if recipe.spans_k else "x".join(map(str, recipe.block)),
        "tensor scale": "given" if recipe.tensor_scale == "given" else str(recipe.tensor_scale != "none"),
        "amax": recipe.granularity,
        "rounding": recipe.rounding,
        "rotation": str(recipe.transform is not None),
        "candidates": recipe.candidates,
    }


def training_traits(name: str) -> dict[str, str]:
    """A training recipe and its options: `MXFP8BlockScaling-2d` has the family MXFP8BlockScaling and the option 2d."""
    family, *options = name.split("-")
    return {"family": family} | dict.fromkeys(options, "True")


TRAITS: dict[str, Callable[[str], dict[str, str]]] = {
    "recipe": recipe_traits, "w_recipe": recipe_traits, "out_recipe": recipe_traits, "training": training_traits,
}  # fmt: skip
"""Keys whose values count as several traits."""


def sizes(case: Case) -> dict[str, int]:
    """Sizes of a case by name. Batches and positions of x (B, S, …) are its rows: M = B·S."""
    extents = dict(case.extents)
    return {"M": extents.pop("B") * extents.pop("S"), **extents} if "B" in extents else extents


def values_of(case: Case) -> dict[str, str]:
    """The values of a case by key, in the order of the keys."""
    found: dict[str, str] = {}
    for key in keys_of(type(case)):
        value = getattr(case, key.field)
        if key.name in _LEFT_OUT:
            continue
        if key.name in TRAITS:
            name = case.recipe_names[0] if value is None else value  # w has the recipe of x by default
            found |= {f"{key.name}.{trait}": text for trait, text in TRAITS[key.name](name).items()}
        else:
            value = key.choices[0] if value is None and key.choices else value  # random bits are Philox's by default
            found[key.name] = str(value).partition(":")[0]
    found |= {name: size_class(size) for name, size in sizes(case).items()}
    return found | {"dimensions": str(len(case.shape))}


def key_of(value: Value) -> str:
    """The key of a value. Values of one key are no pair: a recipe has its traits together."""
    return value[0].partition(".")[0]


def pairs_of(case: Case) -> set[Pair]:
    """Pairs of values of two keys that the case tests: an empty case tests only the pairs of its size 0."""
    values = sorted(values_of(case).items())
    keyed = [(value, key_of(value)) for value in values]
    pairs = {(one, other) for (one, key), (other, other_key) in combinations(keyed, 2) if key != other_key}
    if 0 not in case.shape:
        return pairs
    empty = {value for value in values if value[0] in sizes(case) and value[1] == "0"}
    return {pair for pair in pairs if empty & set(pair)}


def pairs_of_all(cases: Iterable[Case]) -> set[tuple[str, Pair]]:
    """Operations and pairs of all cases. Cases of different input families have the same pairs."""
    different = {(case.operation, *values_of(case).items()): case for case in cases}
    return {(case.operation, pair) for case in different.values() for pair in pairs_of(case)}
