"""The rule with the most bytes of a quantizer: a search over the fields of `Recipe`.

The search has three parts: the fields of the scales, from every named dialect and every order of operations; the fields
of the elements, given these scales; the fields left open by the bytes. `_descend` changes a group of fields at a time,
with all their values, until no change explains more bytes. The numbers below limit the time of the search. A small
limit can miss a rule, and accepts no wrong rule: the report counts all bytes that the found rule does not explain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import product
from types import SimpleNamespace
from typing import Any

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.tools.dialect.differences import Difference, classified
from narrowgauge.harness.tools.dialect.inputs import Given, Observed, observe
from narrowgauge.harness.tools.dialect.probes import probes
from narrowgauge.harness.tools.dialect.rules import (
    CHOICES,
    ELEMENT_FIELDS,
    SCALE_FIELDS,
    Rules,
    Score,
    with_fields,
)
from narrowgauge.reference import ops as reference
from narrowgauge.spec import dialects as named
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.recipes import Recipe, find_recipe, own_rules

_ORDER = ("tensor_scale", "block_scale", "scale_rounding", "statistics")
"""Fields with an effect on the scales of ordinary blocks."""
_FLOAT_SCALES = (*_ORDER[:3], "largest_scale")
"""Fields of float32 scales: an infinite max/amax becomes the largest scale, and amax/max is never infinite."""
_FIRST_SCALES = (*_ORDER, "zero_block", "smallest_scale")
"""Fields of scales; the search starts from all their values."""
_EDGES = (("tensor_limit", "nan", "smallest_amax"), ("zero_block", "smallest_scale"))
"""Fields with an effect on the remaining scales, in groups whose values hide each other's effect."""
_FIRST_ELEMENTS = ("element_scale", "rounding", "zero_scale")
_LAST_ELEMENTS = (("negative_zero",), ("nan_code",), ("zero_scale",), ("zero_scale", "nan_code"))
_ANY_ELEMENTS = ("x/(s/enc)", "x/(s*dec)", "x/s")
"""A form of the elements per form of the tensor scale, during the search for the scales."""
_TENSOR = ("tensor_scale", "block_scale", "statistics")
_DEAD = ("zero_scale", "negative_zero", "nan_code")
"""Fields with a joint effect on the codes of blocks with a scale of 0 or NaN."""
_STARTS = 16
"""Number of pairs (form, rounding) of elements, best first, whose remaining fields are searched on a part of the
rows."""
_BEHIND = 4
"""A pair (form, rounding) is dropped if it has this many times the differing codes of the best pair (plus 100)."""
_ON_ALL_ROWS = 3
"""Number of rules for the elements tried on all rows."""
_NEAR = 3
"""Number of dialects compared with the found rule: this many nearest by bytes, and this many nearest by inputs."""
_OF_ORDER, _OF_FORM = 4, 100
"""Number of rules for the scales ranked on all inputs: per order of operations, and per form of the tensor scale."""
_STARTS_OF_FORM = 2
"""Number of starting points of the search for the scales, per form of the tensor scale."""
_COUPLED = (
    ("tensor_scale", "block_scale", "element_scale", "zero_scale"),
    ("tensor_scale", "tensor_limit", "statistics"),
    ("element_scale", "zero_scale"),
    ("block_scale", "zero_block", "statistics"),
    ("rounding", "nan_code"),
)
"""Fields often changed together, because a recipe excludes combinations of their values."""
_FORM = ("tensor_scale", "block_scale", "element_scale", "zero_scale")
"""Fields of a recipe with a single scale for a tensor: a value of a field excludes values of the remaining fields."""


@dataclass
class Agreement:
    """A named dialect beside the bytes of a quantizer."""

    dialect: str
    recipe: Recipe
    scales: Score
    """Differing block scales."""
    codes: Score
    """Differing codes under the quantizer's own scales."""
    explained: int
    """Inputs with every byte equal."""
    alike: int
    """Number of inputs with differences only in signs of 0 and NaN and in codes under scales of 0 or NaN."""

    @property
    def plain(self) -> Recipe:
        """The dialect with the first element in the low nibble, the form of all compared rules."""
        return with_fields(self.recipe) or self.recipe

    @property
    def score(self) -> Score:
        """All differing bytes."""
        return self.scales + self.codes


@dataclass
class Fit:
    """The rule of a quantizer."""

    recipe: str
    """Name of the requested recipe."""
    rules: Rules = field(repr=False)
    """Rules on the bytes of the quantizer."""
    agreements: list[Agreement]
    """Named dialects, nearest first."""
    rule: Recipe
    """The rule with the most explained bytes, and with as few changes of the nearest dialect as possible."""
    nearest: Agreement
    """The dialect with the fewest fields different from `rule`."""
    changes: dict[str, tuple[Any, Any]]
    """Fields of `rule` different from `nearest`: the value of the dialect, and of the rule."""
    alternatives: dict[str, list[Any]]
    """Alternative values of fields with as many explained bytes: no input separates the values."""
    differences: list[Difference] = field(default_factory=list)
    """Bytes not explained by `rule`, by class."""

    @property
    def observed(self) -> Observed:
        """The bytes of the quantizer."""
        return self.rules.observed

    @property
    def matching(self) -> list[Agreement]:
        """Dialects with equal bytes on every input: several if no input separates them."""
        return [agreement for agreement in self.agreements if agreement.score == Score(0, 0)]

    @property
    def explained(self) -> bool:
        """Whether a dialect with the listed changes, and differences of known classes, explains every byte."""
        return _known(self.differences)

    @property
    def total(self) -> tuple[int, int]:
        """Number of all block scales and of all codes."""
        stacks = self.observed.stacks
        return sum(stack.scales.numel() for stack in stacks), sum(stack.codes.numel() for stack in stacks)


def dialects_of(recipe: Recipe) -> list[Recipe]:
    """The recipe in all its dialects, rules of a user among them.

    Raises ValueError for a recipe with rotation, whose bytes also depend on the order of summation.
    """
    if recipe.transform:
        raise ValueError(f"recipe {recipe} rotates in an order that is free; ask for the recipe without the rotation")
    tables = [named.DIALECTS, named.MX_DIALECTS, *named.FP8_DIALECTS.values()]
    own = [rule.recipe.dialect for rule in own_rules().values() if rule.recipe.name == recipe.name]
    names = dict.fromkeys(["te", *(name for table in tables for name in table), *own])
    found = []
    for name in names:
        try:
            found.append(find_recipe(f"{recipe.name}@{name}"))
        except ValueError:  # the dialect does not exist for this recipe
            continue
    return found


def fit(backend: Backend, name: str = "nvfp4", *, device: str = "cpu", seed: int = 0) -> Fit:
    """Fit the rule of `backend.quantize`, asked for the recipe `name`, to its bytes on every family and dtype.

    Raises ValueError as `dialects_of` does and for an unknown recipe, and as `observe` does if the backend quantizes no
    input.
    """
    recipe = find_recipe(name)
    dialects = dialects_of(recipe)
    result = fitted(observe(backend, recipe, device=device, seed=seed), dialects)
    return _separated(backend, result, device, seed) if result.changes and result.explained else result


def fitted(observed: Observed, dialects: list[Recipe]) -> Fit:
    """The rule of these bytes. `dialects`: the named rules to compare with."""
    rules = Rules(observed)
    agreements = sorted((agreement_with(rules, dialect) for dialect in dialects), key=lambda agreement: agreement.score)
    best = agreements[0]
    if best.score == Score(0, 0):
        return Fit(str(observed.recipe), rules, agreements, best.plain, best, {}, {}, [])
    if best.score.major == 0:
        # Every value equals the dialect's. A changed choice of signs of 0 or of dead blocks counts only if it explains
        # all.
        found = _descend(best.plain, _LAST_ELEMENTS, rules.code_score, _with_elements)
        found = min((found, _elements(rules, [best.plain])), key=rules.code_score)
        exact = rules.code_score(found) == Score(0, 0)
        rule, nearest, changes = simplified(rules, found if exact else best.plain, best)
    else:
        found = _search(rules, [agreement.plain for agreement in agreements])
        simple = [simplified(rules, found, agreement) for agreement in agreements[:_NEAR]]
        rule, nearest, changes = min(simple, key=lambda result: len(result[2]))
        left = classified(rules, rule)
        if not _known(left):
            rule, nearest, changes = simple[0]  # the ranking decides where fields are no facts
        # Many special bytes may outweigh the fields of a dialect. A rounding with unexplained ties is no fact.
        doubtful = not _known(left) or ("rounding" in changes and any(d.kind == "rounding of ties" for d in left))
        near_by_inputs = sorted(agreements, key=lambda agreement: -agreement.alike)[:_NEAR]
        near_alone = (*agreements[:_NEAR], *near_by_inputs)
        whole = (near for near in near_alone if _known(classified(rules, near.plain)))
        if doubtful and (named_alone := next(whole, None)) is not None:
            rule, nearest, changes = named_alone.plain, named_alone, {}
        # An order of operations without a further explained class of differences is no fact.
        ordered = bool(changes) and changes.keys() <= set(_ORDER) and _known(left)
        if ordered and _kinds(classified(rules, nearest.plain)) <= _kinds(left):
            rule, changes = nearest.plain, {}
    differences = classified(rules, rule)
    return Fit(str(observed.recipe), rules, agreements, rule, nearest, changes, {}, differences)


def _known(differences: list[Difference]) -> bool:
    return all(difference.known for difference in differences)


def _kinds(differences: list[Difference]) -> set[str]:
    return {difference.kind for difference in differences}


def agreement_with(rules: Rules, recipe: Recipe) -> Agreement:
    plain = with_fields(recipe) or recipe
    unequal = [scales + codes for scales, codes in rules.by_input(plain)]
    explained = sum(score == Score(0, 0) for score in unequal)
    alike = sum(score.major == 0 for score in unequal)
    return Agreement(recipe.dialect, recipe, rules.scale_score(plain), rules.code_score(plain), explained, alike)


# ---- search ----------------------------------------------------------------------------------------------------------


def _search(rules: Rules, starts: list[Recipe]) -> Recipe:
    """The rule with the best score, from these rules and every order of operations."""
    ends: list[Recipe] = []
    tried: Counter[str] = Counter()
    groups = (*_EDGES, *_rest(), _ORDER, *([_FLOAT_SCALES] if starts[0].scale is FP32 else []))
    for start in _orders(rules, starts):
        tried[start.tensor_scale] += 1
        if tried[start.tensor_scale] > _STARTS_OF_FORM:
            continue
        ends.append(_descend(start, groups, rules.scale_score, _with_scales))
        if rules.scale_score(ends[-1]) == Score(0, 0):
            break
    return _elements(rules, _equal_scales(rules, min(ends, key=rules.scale_score)))


def _equal_scales(rules: Rules, found: Recipe) -> list[Recipe]:
    """`found`, and rules of equal score for the scales with tensor scales an ulp apart: the elements decide."""
    alike = {rules.tensor_key(found): found}
    for values in product(*(CHOICES[name] for name in _TENSOR)):
        recipe = _with_scales(found, _TENSOR, values)
        if recipe is not None and rules.scale_score(recipe) == rules.scale_score(found):
            alike.setdefault(rules.tensor_key(recipe), recipe)
    return list(alike.values())


def _rest() -> list[tuple[str, ...]]:
    """Fields of scales in no group above, as groups of a single field."""
    grouped = {name for group in (_ORDER, *_EDGES) for name in group}
    return [(name,) for name in SCALE_FIELDS if name not in grouped]


def _orders(rules: Rules, starts: list[Recipe]) -> list[Recipe]:
    """`starts`, and the nearest start with all values of the first fields, best first."""
    base = min(starts, key=rules.scale_score)
    found = (_with_scales(base, _FIRST_SCALES, values) for values in _values(base, _FIRST_SCALES))
    orders = dict.fromkeys([*starts, *(recipe for recipe in found if recipe is not None)])
    # The inputs of a single dtype choose the rules for a comparison on all inputs: the best of every order.
    known, near = set(starts), list[Recipe]()
    seen: Counter[Any] = Counter()
    for recipe in sorted(orders, key=lambda recipe: rules.sampled_scale_score(recipe, rules.one_dtype)):
        order = tuple(getattr(recipe, name) for name in _ORDER)
        seen.update((order, recipe.tensor_scale))
        if recipe in known or (seen[order] <= _OF_ORDER and seen[recipe.tensor_scale] <= _OF_FORM):
            near.append(recipe)
    return sorted(near, key=rules.sampled_scale_score)


def _values(base: Recipe, names: tuple[str, ...]) -> Iterable[tuple[Any, ...]]:
    """All values of fields, without forms excluded by every recipe of this kind."""
    if "block_scale" not in names:
        return product(*(CHOICES[name] for name in names))
    forms, roundings = _forms(find_recipe(base.name))
    rest = [roundings if name == "scale_rounding" else CHOICES[name] for name in names[2:]]
    return ((*form, *values) for form in forms for values in product(*rest))


@lru_cache(maxsize=16)
def _forms(base: Recipe) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """Forms of the tensor scale with forms of the block scale, and roundings, of recipes like `base`."""
    tried = product(CHOICES["tensor_scale"], CHOICES["block_scale"], CHOICES["scale_rounding"])
    found = [form for form in tried if _with_scales(base, _ORDER[:3], form) is not None]
    return list(dict.fromkeys(form[:2] for form in found)), list(dict.fromkeys(form[2] for form in found))


@lru_cache(maxsize=1 << 16)
def _with_scales(base: Recipe, names: tuple[str, ...], values: tuple[Any, ...]) -> Recipe | None:
    """`base` with changed choices of the scales, and if necessary a changed form of elements, zero block or largest
    scale."""
    changed = dict(zip(names, values, strict=True))
    if (changed.get("tensor_scale", base.tensor_scale) == "given") != (base.tensor_scale == "given"):
        return None
    factor = _factor(changed.get("block_scale", base.block_scale))
    largest = (None, "float32") if base.scale is FP32 else (None,)
    for element, zero, most in product((None, *_ANY_ELEMENTS), (None, "keep"), largest):
        if _factor(element or base.element_scale) != factor:
            continue  # no recipe divides blocks and elements by different factors of the tensor
        more: dict[str, Any] = {} if element is None else {"element_scale": element, "zero_scale": "infinity"}
        more |= {} if zero is None else {"zero_block": zero}
        more |= {} if most is None else {"largest_scale": most}
        recipe = with_fields(base, **(more | changed))
        if recipe is not None:
            return recipe
    return None


def _factor(expression: str) -> str:
    return next((factor for factor in ("enc", "dec") if factor in expression), "")


def _elements(rules: Rules, starts: list[Recipe]) -> Recipe:
    """The rule with the best score: a start with its best choices of the elements."""

    @cache
    def by_one(recipe: Recipe) -> Score:
        return rules.ordinary_code_score(recipe, rules.one_dtype)

    first: list[Recipe] = []
    for start in starts:
        # The choice for a scale of 0 under the first tensor scale serves the other tensor scales.
        known = min(first, key=by_one) if first else None
        for values in product(*(CHOICES[name] for name in _FIRST_ELEMENTS)):
            changed = dict(zip(_FIRST_ELEMENTS, values, strict=True))
            if known is not None and changed["zero_scale"] != _zero_scale_of(known, start, changed):
                continue
            if (changed["rounding"] == "stochastic") == (start.rounding == "stochastic"):
                recipe = with_fields(start, **changed)
                first += [recipe] if recipe is not None else []
    # The best of every form and rounding, then the choices visible in few codes, on a part of the rows.
    kinds: dict[Any, Recipe] = {}
    for candidate in sorted(first, key=by_one):
        kinds.setdefault((rules.tensor_key(candidate), candidate.element_scale, candidate.rounding), candidate)
    ends: list[Recipe] = []
    ranked = sorted((rules.ordinary_code_score(kind), number) for number, kind in enumerate(kinds.values()))
    for score, number in ranked[:_STARTS]:
        if score.major > _BEHIND * (ranked[0][0].major + 100):
            break
        candidate = list(kinds.values())[number]
        ends.append(_descend(candidate, _LAST_ELEMENTS, rules.sampled_code_score, _with_elements))
        if rules.sampled_code_score(ends[-1]) == rules.code_score(ends[-1]) == Score(0, 0):
            return ends[-1]
    best = sorted(ends, key=rules.sampled_code_score)[:_ON_ALL_ROWS]
    ends = [_descend(end, _LAST_ELEMENTS, rules.code_score, _with_elements) for end in best]
    best_end = min(ends, key=rules.code_score)
    if rules.code_score(best_end) == Score(0, 0):
        return best_end
    together = _descend(best_end, (_DEAD,), rules.sampled_code_score, _with_elements)
    return min((best_end, together), key=rules.code_score)


def _zero_scale_of(known: Recipe, start: Recipe, changed: dict[str, Any]) -> str:
    """The choice of `known` for a scale of 0, or the first choice that fits the form."""
    for zero in (known.zero_scale, *CHOICES["zero_scale"]):
        if with_fields(start, **(changed | {"zero_scale": zero})) is not None:
            return str(zero)
    return ""


def _with_elements(base: Recipe, names: tuple[str, ...], values: tuple[Any, ...]) -> Recipe | None:
    return with_fields(base, **dict(zip(names, values, strict=True)))


def _descend(
    start: Recipe,
    groups: Iterable[tuple[str, ...]],
    score: Callable[[Recipe], Score],
    changed: Callable[[Recipe, tuple[str, ...], tuple[Any, ...]], Recipe | None],
) -> Recipe:
    """The best rule reachable from `start` by changes of a group of fields at a time."""
    best, least = start, score(start)
    improved = True
    while improved and least != Score(0, 0):
        improved = False
        for group in groups:
            for values in _values(best, group):
                recipe = changed(best, group, values)
                if recipe is not None and (found := score(recipe)) < least:
                    best, least, improved = recipe, found, True
    return best


# ---- what the bytes leave open ---------------------------------------------------------------------------------------


def simplified(
    rules: Rules, found: Recipe, agreement: Agreement
) -> tuple[Recipe, Agreement, dict[str, tuple[Any, Any]]]:
    """`found` with the value of a dialect in every field in which the dialect explains as many bytes, the dialect, and
    the remaining changes."""
    dialect, least = agreement.plain, rules.score(found)
    rule = found
    for group in (*((name,) for name in CHOICES), *_COUPLED):
        values = {name: getattr(dialect, name) for name in group}
        if all(getattr(rule, name) == value for name, value in values.items()):
            continue
        recipe = with_fields(rule, **values)
        if recipe is not None and rules.score(recipe) <= least:
            rule, least = recipe, rules.score(recipe)
    if rules.code_score(rule).minor:
        # Signs of 0 and dead codes stay unexplained: a choice with a part of these codes says less than their class.
        for name, *more in _LAST_ELEMENTS:
            recipe = None if more else with_fields(rule, **{name: getattr(dialect, name)})
            if recipe is not None and rules.score(recipe).major <= least.major:
                rule = recipe
    return rule, agreement, _changes(dialect, rule)


def _changes(dialect: Recipe, rule: Recipe) -> dict[str, tuple[Any, Any]]:
    """Fields with different values in a rule and a dialect: both values."""
    pairs = {name: (getattr(dialect, name), getattr(rule, name)) for name in CHOICES}
    return {name: (theirs, own) for name, (theirs, own) in pairs.items() if theirs != own}


def _alternatives(rules: Rules, rule: Recipe) -> list[tuple[str, Any, Recipe]]:
    """The changed rules of equal score: the field, its value, and the rule."""
    least = rules.score(rule)
    found: list[tuple[str, Any, Recipe]] = []
    for name, choices in CHOICES.items():
        for value in choices:
            if value == getattr(rule, name) or (value == "stochastic" or rule.rounding == "stochastic"):
                continue
            for recipe in _with_value(rule, name, value):
                if name not in ELEMENT_FIELDS and rules.scale_score(recipe) > rules.scale_score(rule):
                    continue
                if rules.score(recipe) == least:
                    found.append((name, value, recipe))
                    break
    return found


def _with_value(rule: Recipe, name: str, value: Any) -> Iterable[Recipe]:
    """`rule` with a changed value of a field. If the value excludes values of further fields: with every choice of
    these."""
    plain = with_fields(rule, **{name: value})
    if plain is not None:
        return [] if plain == rule else [plain]
    excluding = {"element_scale": _FORM[3:], "tensor_scale": _FORM[1:] if rule.whole else ()}
    others = excluding.get(name, ())
    found = (
        with_fields(rule, **{name: value}, **dict(zip(others, values, strict=True)))
        for values in product(*(CHOICES[other] for other in others))
    )
    return (recipe for recipe in found if recipe is not None)


def _separated(backend: Backend, result: Fit, device: str, seed: int) -> Fit:
    """`result` with the rule that also explains further inputs, on which its alternatives give different bytes.

    Inputs are drawn, and the backend runs on inputs that separate the rule from an alternative.
    """
    recipe, rule = result.observed.recipe, result.rule
    drawn = probes(recipe, seed, device)
    given = _given(rule, recipe, drawn, device)
    rejected: set[Recipe] = set()
    remaining: dict[str, list[Any]] = {}
    queue = _alternatives(result.rules, rule)
    while queue:
        name, value, other = queue.pop(0)
        if other in rejected:
            continue
        asked = [] if given is None else _separating(drawn, given, other)
        try:
            seen = Rules(observe(backend, recipe, device=device, given=asked)) if asked else None
        except (BackendError, Unsupported, HostLost):
            seen = None
        if seen is None or seen.score(other) == seen.score(rule):
            remaining.setdefault(name, []).append(value)
        elif seen.score(other) > seen.score(rule):
            rejected.add(other)
        else:  # the better rule may have different alternatives
            rejected.add(rule)
            rule, given, remaining = other, _given(other, recipe, drawn, device), {}
            queue = _alternatives(result.rules, rule)
    return replace(
        result,
        rule=rule,
        changes=_changes(result.nearest.plain, rule),
        alternatives=remaining,
        differences=classified(result.rules, rule),
    )


def _given(rule: Recipe, recipe: Recipe, inputs: list[Given], device: str) -> Rules | None:
    """The bytes of `rule` for these inputs; None if the rule refuses an input."""
    door = Backend.local(
        "rule", SimpleNamespace(quantize=lambda x, _, **options: reference.quantize(x, rule, **options))
    )
    try:
        observed = observe(door, recipe, device=device, given=inputs)
    except (BackendError, Unsupported, HostLost):
        return None
    return None if observed.skipped else Rules(observed)


def _separating(drawn: list[Given], given: Rules, other: Recipe) -> list[Given]:
    """At most two of the inputs with different bytes under `other`."""
    found = []
    for number, stack in enumerate(given.observed.stacks):
        dtype = stack.names[0].split(" ")[1]
        inputs = [one for one in drawn if one.dtype == dtype]
        scores = given.unequal_by_input(number, other)
        found += [one for one, score in zip(inputs, scores, strict=True) if sum(score, Score(0, 0)) != Score(0, 0)]
    return found[:2]
