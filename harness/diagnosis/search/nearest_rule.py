"""The rule nearest to the bytes of a quantizer over all cases, and what it leaves unexplained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch

from narrowgauge.harness.checks.bit_equality import different_bits
from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.diagnosis.patterns.element_classes import code_classes, scale_classes
from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import ROW_STAGES, KernelMatrix, kernel_matrix
from narrowgauge.harness.diagnosis.quantize.recipe_fields import (
    EPSILONS,
    changed_recipe,
    dialect_deviations,
    fp8_recipes,
    variants,
)
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import Judged
from narrowgauge.reference.quantize.layout import elements
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.recipes import RULE_FIELDS, Recipe, find_recipe

WRONG, RIGHT = 8, 2
"""Largest numbers of matrices with wrong stages, and of correct ones, that a rule is compared with."""
_ROWS = 16
"""Rows of a matrix that a rule is compared with."""
_CHANGES = 4
"""Largest number of fields in which the rule differs from a named recipe."""
_SHARE = 0.5
"""Largest share of the wrong bytes of the asked recipe that the nearest rule may leave."""
_FIELDS = tuple(name for name in RULE_FIELDS if name not in ("decode", "alpha", "packing", "smallest_amax"))
"""Fields with choices that decide the bytes of `quantize`."""
_OF_CODES = ("element_scale", "rounding", "zero_scale", "negative_zero", "nan_code")
_OF_SCALES = ("block_scale", "zero_block", "smallest_scale", "scale_rounding", "largest_scale")
"""Fields that decide codes alone, and scales alone. Codes under float32 scales also depend on the block amaxes."""
_KINDS = {
    "scales": ("not-finite", "zero-blocks", "subnormal", "ties"),
    "codes": ("nan", "not-finite", "zero-scales", "zero", "subnormal", "ties", "saturated", "subnormal-codes"),
}
"""Classes that a wrong scale or code is counted in: the first that holds it."""


@dataclass(frozen=True)
class NearestRule:
    """The rule nearest to the bytes of a quantizer."""

    recipe: Recipe
    """A recipe in one of its dialects, which a name finds, or such a recipe with changed fields."""
    name: str
    changes: dict[str, object]
    """Values of the changed fields."""
    compared: int
    """Codes and scales of the compared matrices."""
    wrong: int
    """Codes and scales that the rule does not explain."""
    asked_wrong: int
    """Codes and scales that differ from those of the asked recipe."""
    left: Counter[str]
    """The unexplained codes and scales by kind."""

    def __str__(self) -> str:
        changed = ", ".join(f"{name} {value}" for name, value in self.changes.items())
        share = f"{format_count(self.wrong)} of {format_count(self.compared)} codes and scales"
        explained = f"leaves {share} unexplained" if self.wrong else f"explains all {format_count(self.compared)} bytes"
        kinds = "; ".join(f"{format_count(count)} {kind}" for kind, count in self.left.most_common())
        asked = f"as asked {format_count(self.asked_wrong)} differ"
        rule = f"{self.name} with {changed}" if changed else self.name
        return f"{rule} {explained}{': ' if kinds else ''}{kinds} ({asked})"


def nearest_rule(outcomes: Iterable[Outcome]) -> NearestRule | None:
    """The rule nearest to the bytes of all outcomes of a recipe. None if the recipe as asked is nearest, or leaves less
    than twice as many bytes.

    Rules are the recipe, its dialects, FP8 recipes with the same blocks and elements, and rules with up to `_CHANGES`
    other fields than the recipe or than the nearest of these. A field is changed if this explains more bytes than any
    other change of one field.
    """
    every = [
        (kernel_matrix(judged), judged)
        for outcome in outcomes
        for judged in outcome.judged
        if judged.subject.matrix.numel() and not judged.subject.own
    ]
    if not every:
        return None
    asked = every[0][0].subject.recipe
    wrong_as_asked = [_count(matrix, asked) for matrix, _ in every]
    wrong_ones = [matrix for (matrix, _), wrong in zip(every, wrong_as_asked, strict=True) if wrong]
    right_ones = [matrix for (matrix, _), wrong in zip(every, wrong_as_asked, strict=True) if not wrong]
    if not wrong_ones:
        return None
    sample = [*_spread(wrong_ones, WRONG), *_spread(right_ones, RIGHT)]
    best, base = _nearest(list(map(_some_rows, sample)), asked)
    wrong = [_count(matrix, best) for matrix, _ in every]
    missed = sorted(range(len(every)), key=lambda number: -wrong[number])[:WRONG]
    if any(wrong[number] and all(every[number][0] is not each for each in sample) for number in missed):
        again, its_base = _nearest(
            [_some_rows(every[number][0]) for number in missed] + list(map(_some_rows, sample)), asked
        )
        of_again = [_count(matrix, again) for matrix, _ in every]
        if sum(of_again) < sum(wrong):
            best, base, wrong = again, its_base, of_again
    if sum(wrong) > _SHARE * sum(wrong_as_asked):
        return None
    changes = {
        field.name: getattr(best, field.name)
        for field in fields(Recipe)
        if getattr(best, field.name) != getattr(base, field.name)
    }
    left: Counter[str] = Counter()
    for (matrix, judged), count in zip(every, wrong, strict=True):
        if count:
            left.update(_kinds(judged, matrix, best))
    compared = sum(matrix.kernel_stages["scales"].numel() + matrix.element_count for matrix, _ in every)
    return NearestRule(best, str(base), changes, compared, sum(wrong), sum(wrong_as_asked), left)


def _nearest(matrices: Sequence[KernelMatrix], asked: Recipe) -> tuple[Recipe, Recipe]:
    """The rule that leaves the fewest bytes of the matrices, and the named recipe that it is made from."""
    wrong_of: dict[tuple[Hashable, ...], int] = {}

    def wrong(recipe: Recipe) -> int:
        count = 0
        for stage in ROW_STAGES:
            key = (stage, *(getattr(recipe, name) for name in _decided_by(stage, recipe)))
            if key not in wrong_of:
                wrong_of[key] = sum(int(_mask(matrix, recipe, stage).count_nonzero()) for matrix in matrices)
            count += wrong_of[key]
        return count

    def descend(best: Recipe) -> Recipe:
        for _ in range(_CHANGES):
            before = best
            if not wrong(best) or (best := min((best, *_with_one_change(best)), key=wrong)) == before:
                break
        return best

    others = (*map(changed_recipe, dialect_deviations(asked)), *(recipe for _, recipe in fp8_recipes(asked)))
    by_changes = sorted(filter(_is_named, others), key=lambda recipe: _count_changes(asked, recipe))
    named = min((asked, *by_changes), key=wrong)  # the first of equal ones has the fewest changes
    one = min(_with_one_change(asked), key=wrong)
    if not wrong(named) and (wrong(one) or _choices(named) == _choices(one)):
        return named, named
    best = descend(asked)
    return (best, asked) if wrong(best) <= wrong(named) else (descend(named), named)


def _choices(recipe: Recipe) -> tuple[object, ...]:
    """Everything that decides the bytes of `quantize`, beside the parts of the name."""
    return tuple(getattr(recipe, name) for name in (*_FIELDS, "smallest_amax"))


def _count_changes(one: Recipe, other: Recipe) -> int:
    return sum(left != right for left, right in zip(_choices(one), _choices(other), strict=True))


def _is_named(recipe: Recipe) -> bool:
    """Whether a name finds the recipe."""
    return find_recipe(str(recipe)) == recipe


def _with_one_change(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe with another value of a field."""
    for name in _FIELDS:
        for value in RULE_FIELDS[name]:
            if value != getattr(recipe, name) and "stochastic" not in (value, name == "rounding" and recipe.rounding):
                yield from variants(recipe, name, value)
    for epsilon in EPSILONS if recipe.scale is FP32 else ():
        if epsilon != recipe.smallest_amax:
            yield from variants(recipe, "smallest_amax", epsilon)


def _spread(matrices: list[KernelMatrix], most: int) -> list[KernelMatrix]:
    """At most so many of the matrices, evenly spread."""
    return matrices[:: -(-len(matrices) // most)] if matrices else []


def _some_rows(matrix: KernelMatrix) -> KernelMatrix:
    """The first rows of a matrix: at least `_ROWS`, in whole tiles."""
    count = min(-(-_ROWS // matrix.tile_height) * matrix.tile_height, matrix.subject.matrix.shape[0])
    return matrix.select_rows(slice(0, count))


def _decided_by(stage: str, recipe: Recipe) -> tuple[str, ...]:
    """Fields that decide a stage, given the kernel's results of the stages before."""
    if recipe.scale is FP32:
        return (*_FIELDS, "smallest_amax")
    return tuple(name for name in _FIELDS if name not in (_OF_CODES if stage == "scales" else _OF_SCALES))


def _count(matrix: KernelMatrix, recipe: Recipe) -> int:
    """The scales and codes of a matrix that differ from those of a recipe."""
    return sum(int(_mask(matrix, recipe, stage).count_nonzero()) for stage in ROW_STAGES)


def _mask(matrix: KernelMatrix, recipe: Recipe, stage: str) -> torch.Tensor:
    """The wrong elements of a stage, given the kernel's results of the stages before. All if the recipe refuses the
    matrix."""
    deviation: QuantizeDeviation = QuantizeDeviation(
        "", "", "recipe", partial(_as_changed, recipe), stages=frozenset({"tensor scale", *ROW_STAGES})
    )
    found = matrix.kernel_stages[stage]
    try:
        expected = Replay(matrix, deviation).compute_stage(stage)
    except ValueError:
        expected = found ^ 1 if found.dtype == torch.uint8 else found + 1
    if stage == "codes":
        columns, asked = matrix.subject.matrix.shape[1], matrix.subject.recipe
        found, expected = (elements(codes, columns, asked) for codes in (found, expected))
    return different_bits(found, expected)


def _as_changed(recipe: Recipe, _: object) -> Recipe:
    return recipe


def _kinds(judged: Judged, matrix: KernelMatrix, recipe: Recipe) -> Counter[str]:
    """The scales and codes that a recipe does not explain, by kind."""
    counts: Counter[str] = Counter()
    for stage in ROW_STAGES:
        mask = remaining = _mask(matrix, recipe, stage)
        if not bool(mask.any()):
            continue
        classes = (scale_classes if stage == "scales" else code_classes)(judged)
        known = {name: (phrase, members) for name, phrase, members in classes if members.shape == mask.shape}
        for phrase, members in (known[name] for name in _KINDS[stage] if name in known):
            counts[f"{stage} {phrase}"] += int((remaining & members).count_nonzero())
            remaining = remaining & ~members
        counts[f"other {stage}"] += int(remaining.count_nonzero())
    return +counts
