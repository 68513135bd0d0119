"""Mistakes in the Hadamard transform (rotation) of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import frexp

import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.rotation_interval import rotated_interval
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.outcome import Limit
from narrowgauge.harness.operations.stages.possible_cause import Cause
from narrowgauge.reference.quantize.hadamard import butterfly, coefficient, signs, transform
from narrowgauge.spec.arguments import check_rotation
from narrowgauge.spec.recipes import RHT_GROUPS, RHT_SIGNS, Recipe

Ends = tuple[torch.Tensor, torch.Tensor]
"""Smallest and largest possible value of each rotated element."""
Rotate = Callable[[torch.Tensor, Recipe], Ends]
"""Function from a matrix and a recipe to the ends of the rotated matrix."""
_MASK = 0xFFFF
_FACTOR = "the rotation lacks its factor {:g}"


def deviating_rotations(x: torch.Tensor, recipe: Recipe) -> Iterator[tuple[str, str, Callable[[], torch.Tensor]]]:
    """Known wrong rotations of `x` (M, K), bfloat16, that add in the order of `reference.quantize.hadamard`.

    Yields cause, sentence, and function to the rotated matrix (M, K): bfloat16, but float32 for `rotation-not-rounded`.
    Several causes can give the same bytes, such as two changes of a sign mask that has no signs. Raises the errors of
    `transform`.
    """

    def rotate(matrix: torch.Tensor, matrix_recipe: Recipe) -> Ends:
        rotated = transform(matrix, matrix_recipe)
        return rotated, rotated

    for cause, sentence, ends in deviating_ends(x, recipe, rotate):
        yield cause, sentence, lambda ends=ends: ends()[0]  # type: ignore[misc]
    group = check_rotation(x, recipe).group
    if not _is_factor_exact(group):
        yield "rotation-without-factor", _FACTOR.format(coefficient(group)), lambda: _sums(x, recipe, 1.0).bfloat16()
    for phrase, distance in (("last", group // 2), ("first", 1)):
        yield (
            "rotation-stage-missing", f"the {phrase} stage of the rotation's sums is missing",
            lambda distance=distance: _sums(x, recipe, skipped_distance=distance).bfloat16(),  # type: ignore[misc]
        )  # fmt: skip
    yield "rotation-not-rounded", "rotated elements are not rounded to bfloat16", lambda: _sums(x, recipe)
    yield (
        "rotation-truncated", "rotated elements are truncated to bfloat16, not rounded",
        lambda: (_sums(x, recipe).view(torch.int32) & ~_MASK).view(torch.float32).bfloat16(),
    )  # fmt: skip
    yield (
        "rotation-through-bf16", "the rotation adds in bfloat16, not in float32",
        lambda: _sums(x, recipe, stage_dtype=torch.bfloat16).bfloat16(),
    )  # fmt: skip


def deviating_ends(x: torch.Tensor, recipe: Recipe, rotate: Rotate) -> Iterator[tuple[str, str, Callable[[], Ends]]]:
    """Known wrong rotations that are correct rotations of a different matrix, or with a different recipe.

    `rotate` gives the ends of a rotated matrix. Yields cause, sentence, and function to the ends (M, K).
    """
    rotation = check_rotation(x, recipe)
    group, mask = rotation.group, rotation.signs

    def with_rotation(**changes: int) -> Callable[[], Ends]:
        return lambda: rotate(x, replace(recipe, transform=replace(rotation, **changes)))

    yield "rotation-missing", "elements are not rotated", lambda: (x, x)
    yield "rotation-without-signs", "the rotation lacks its signs", with_rotation(signs=0)
    for name, other_signs, phrase in (
        ("negated", mask ^ _MASK, "all of them negated"),
        ("reversed", int(f"{mask:016b}"[::-1], 2), "in reverse order"),
    ):
        yield f"rotation-signs:{name}", f"the rotation has its signs, {phrase}", with_rotation(signs=other_signs)
    if not mask:
        yield "rotation-signs:te", "the rotation has signs, those of Transformer Engine", with_rotation(signs=RHT_SIGNS)

    if group < len(row := signs(replace(rotation, group=16))) and x.shape[1] > group:

        def along_row() -> Ends:
            factors = row.to(x.device).repeat(-(-x.shape[1] // len(row)))[: x.shape[1]]
            return rotate(x * factors.to(x.dtype), replace(recipe, transform=replace(rotation, signs=0)))

        yield "rotation-signs-along-row", f"signs are counted along the row, and not in groups of {group}", along_row

    def signs_after() -> Ends:
        low, high = rotate(x, replace(recipe, transform=replace(rotation, signs=0)))
        negated = (signs(rotation) < 0).to(x.device).repeat(x.shape[1] // group)
        return torch.where(negated, -high, low), torch.where(negated, -low, high)

    yield "rotation-signs-after", "the signs are applied after the rotation, not before", signs_after

    if _is_factor_exact(group):

        def without_factor() -> Ends:
            low, high = rotate(x, recipe)
            return low / coefficient(group), high / coefficient(group)

        yield "rotation-without-factor", _FACTOR.format(coefficient(group)), without_factor

    def last_skipped() -> Ends:
        low, high = (end.clone() for end in rotate(x, recipe))
        low[:, -group:] = high[:, -group:] = x[:, -group:]
        return low, high

    yield "rotation-last-group-skipped", f"the last {group} elements of each row are not rotated", last_skipped
    for other_group in RHT_GROUPS:
        if other_group != group and x.shape[1] % other_group == 0:
            yield (
                f"rotation-group:{other_group}", f"groups of {other_group} are rotated, not of {group}",
                with_rotation(group=other_group),
            )  # fmt: skip
    if x.shape[0] % group == 0:

        def along_rows() -> Ends:
            low, high = rotate(x.T.contiguous(), recipe)
            return low.T.contiguous(), high.T.contiguous()

        yield "rotation-of-columns", f"groups of {group} rows are rotated, not of columns", along_rows


def _is_factor_exact(group: int) -> bool:
    """Whether the factor of a group is a power of two, so that a division by it is exact."""
    return frexp(coefficient(group))[0] == 0.5


def _sums(
    x: torch.Tensor,
    recipe: Recipe,
    factor: float | None = None,
    stage_dtype: torch.dtype = torch.float32,
    skipped_distance: int | None = None,
) -> torch.Tensor:
    """Sums of the rotation before the final rounding, float32 (M, K).

    `factor`: replaces the factor of the recipe. `stage_dtype`: every stage of additions is rounded to this dtype.
    `skipped_distance`: the stage that adds elements at this distance is left out.
    """
    rotation = check_rotation(x, recipe)
    factors = signs(rotation) * (coefficient(rotation.group) if factor is None else factor)
    y = x.contiguous().float() * factors.to(x.device).repeat(x.shape[1] // rotation.group)
    distance = 1
    while distance < rotation.group:
        if distance != skipped_distance:
            y = butterfly(y, distance).to(stage_dtype).float()
        distance *= 2
    return y


Fit = tuple[str, str, Callable[[], bool]]
"""Cause, sentence, and function to whether the deviation gives the result."""


def wrong_rotations(
    x: torch.Tensor, output: torch.Tensor, recipe: Recipe, free: bool, stage: StageResult, limit: Limit
) -> Iterator[Cause]:
    """Wrong rotations that give the result (M, K): tried first on the rows of the first wrong element. `free`: whether
    the order of the additions is free."""
    rows = _tile_of_first_wrong(x, recipe, stage.wrong_elements)
    on_tile = _fitting_rotations(x[rows], output[rows], recipe, free=free)
    on_all = _fitting_rotations(x, output, recipe, free=free)
    for (cause, sentence, fits_tile), (_, _, fits_all) in zip(on_tile, on_all, strict=True):
        if limit.may_try(x[rows].numel()) and fits_tile() and limit.may_verify(cause, x.numel()) and fits_all():
            yield cause, sentence


def _tile_of_first_wrong(x: torch.Tensor, recipe: Recipe, wrong: torch.Tensor | None) -> slice:
    """Rows with the first wrong element that a wrong rotation treats as it treats the whole matrix `x` (M, K).

    A rotation of columns rotates groups of rows. It applies only if M is a multiple of the group.
    """
    if wrong is None or not bool(wrong.any()):
        return slice(0, len(x))
    group = check_rotation(x, recipe).group
    height = 1 if len(x) % group else group
    start = int(wrong.any(1).nonzero()[0]) // height * height
    return slice(start, start + height)


def _fitting_rotations(x: torch.Tensor, output: torch.Tensor, recipe: Recipe, *, free: bool) -> Iterator[Fit]:
    """Wrong rotations of `x`. `free`: the output lies between the ends of all orders of summation."""
    if not free:
        for cause, sentence, compute in deviating_rotations(x, recipe):
            yield cause, sentence, partial(_gives, compute, output)
        return

    def rotate(matrix: torch.Tensor, rotation_recipe: Recipe) -> Ends:
        interval = rotated_interval(matrix, rotation_recipe)
        return interval.lower, interval.upper

    for cause, sentence, ends in deviating_ends(x, recipe, rotate):
        yield cause, sentence, partial(_contain, ends, output)


def _gives(compute: Callable[[], torch.Tensor], output: torch.Tensor) -> bool:
    return equal_bits(compute(), output)


def _contain(ends: Callable[[], Ends], output: torch.Tensor) -> bool:
    """Whether every output lies between its ends, or is NaN like the lower end."""
    low, high = ends()
    ordinals = ordinal.signed_float_ordinals(output)
    inside = (ordinals >= ordinal.signed_float_ordinals(low)) & (ordinals <= ordinal.signed_float_ordinals(high))
    return bool((inside | (output.isnan() & low.isnan())).all())
