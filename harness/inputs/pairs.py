"""Pairs and triples of values of different keys of a case: only a case with both options shows a bug that needs two.

The values of a case are its keys but for the input family, repeated calls and the fields of a contract, which no kernel
is given. A recipe counts as its traits (element,
block, rounding, …), a training recipe as its family and options, a size as its class (0, 1, a multiple of 128 or of 16,
another), sections as their kind, the steps of a module as 1 or more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations
from operator import itemgetter

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.cases.keys import keys_of
from narrowgauge.spec.recipes import find_recipe

_LEFT_OUT = ("inputs", "shape", "bands", "repeats", "concurrency")
_SIZES = (128, 16)

Value = tuple[str, str]
"""Key and value: ("bias", "True"), ("recipe.rounding", "stochastic"), ("K", "1")."""
Values = tuple[Value, ...]
"""Values of different keys, sorted: a pair, a triple."""


def size_class(size: int) -> str:
    """`0`, `1`, `128n`, `16n` or `other`."""
    if size < 2:
        return str(size)
    return next((f"{step}n" for step in _SIZES if size % step == 0), "other")


def value_class(name: str, value: object) -> str:
    """What a value of a key without traits counts as: the kind of sections, `1` or `more` steps."""
    if name == "steps":
        return "1" if value == 1 else "more"
    return str(value).partition(":")[0]


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
    left_out = (*_LEFT_OUT, *case.declared.fields) if isinstance(case, ContractCase) else _LEFT_OUT
    for key in keys_of(type(case)):
        value = getattr(case, key.field)
        if key.name in left_out:
            continue
        if value is None and isinstance(case, ContractCase) and key.name.endswith("_dtype"):
            value = case.dtype  # type: ignore[attr-defined]  # that of the first argument
        if key.name in TRAITS:
            name = case.recipe_names[0] if value is None else value  # w has the recipe of x by default
            found |= {f"{key.name}.{trait}": text for trait, text in TRAITS[key.name](name).items()}
        else:
            value = key.choices[0] if value is None and key.choices else value  # random bits are Philox's by default
            found[key.name] = value_class(key.name, value)
    found |= {name: size_class(size) for name, size in sizes(case).items()}
    return found | {"dimensions": str(len(case.shape))}


def key_of(value: Value) -> str:
    """The key of a value. Values of one key are in no set: a recipe has its traits together."""
    return value[0].partition(".")[0]


def sets_of(case: Case, size: int = 2) -> set[Values]:
    """The sets of `size` values of different keys that the case tests: an empty case tests only those with its size
    0."""
    values = sorted(values_of(case).items())
    found = {chosen(values) for chosen in _choices(tuple(map(key_of, values)), size)}
    if 0 not in case.shape:
        return found
    empty = {value for value in values if value[0] in sizes(case) and value[1] == "0"}
    return {chosen for chosen in found if not empty.isdisjoint(chosen)}


@cache
def _choices(keys: tuple[str, ...], size: int) -> list[Callable[[Sequence[Value]], Values]]:
    """Functions that choose `size` of the values of these keys, of different keys; 2 or more."""
    places = combinations(range(len(keys)), size)
    return [itemgetter(*chosen) for chosen in places if len({keys[n] for n in chosen}) == size]


def sets_of_all(cases: Iterable[Case], size: int = 2) -> set[tuple[str, Values]]:
    """Operations and sets of values of all cases. Cases of different input families have the same sets."""
    different = {(case.operation, *values_of(case).items()): case for case in cases}
    return {(case.operation, values) for case in different.values() for values in sets_of(case, size)}
