"""Mistakes in the Hadamard transform (rotation) of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import frexp

import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.rotation_interval import rotated_interval
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.harness.operations.stages.outcome import Limit
from narrowgauge.harness.operations.stages.possible_cause import Cause
from narrowgauge.reference.quantize.hadamard import butterfly, coefficient, signs, transform
from narrowgauge.spec.arguments import check_rotation
from narrowgauge.spec.recipes import RHT_GROUPS, RHT_SIGNS, Hadamard, Recipe

Ends = tuple[torch.Tensor, torch.Tensor]
"""Smallest and largest possible value of each rotated element."""
Rotate = Callable[[torch.Tensor, Recipe], Ends]
"""Function from a matrix and a recipe to the ends of the rotated matrix."""
_MASK = 0xFFFF


def in_order(x: torch.Tensor, recipe: Recipe) -> Ends:
    """The rotated matrix, with the order of additions of the reference, as both ends."""
    return (transform(x, recipe),) * 2


@dataclass(frozen=True)
class Rotation:
    """The rotation of x (M, K), bfloat16, by a recipe. Raises the errors of `transform` if it does not apply."""

    x: torch.Tensor
    recipe: Recipe
    rotate: Rotate
    """Function to the ends of a rotated matrix."""

    @cached_property
    def by(self) -> Hadamard:
        """The checked rotation."""
        return check_rotation(self.x, self.recipe)

    @property
    def group(self) -> int:
        """Elements that are rotated together."""
        return self.by.group

    def with_fields(self, x: torch.Tensor | None = None, **changes: int) -> Ends:
        """Ends with another group, signs or matrix."""
        return self.rotate(self.x if x is None else x, replace(self.recipe, transform=replace(self.by, **changes)))

    def along_row(self) -> Ends:
        """Ends with signs that are counted along the row."""
        row = signs(replace(self.by, group=16)).to(self.x.device)
        factors = row.repeat(-(-self.x.shape[1] // len(row)))[: self.x.shape[1]]
        return self.with_fields(self.x * factors.to(self.x.dtype), signs=0)

    def signs_after(self) -> Ends:
        """Ends with the signs after the rotation."""
        low, high = self.with_fields(signs=0)
        negated = (signs(self.by) < 0).to(self.x.device).repeat(self.x.shape[1] // self.group)
        return torch.where(negated, -high, low), torch.where(negated, -low, high)

    def without_factor(self) -> Ends:
        """Ends without the factor of the rotation, which is a power of two."""
        low, high = self.rotate(self.x, self.recipe)
        return low / coefficient(self.group), high / coefficient(self.group)

    def last_skipped(self) -> Ends:
        """Ends with the last group of each row as in x."""
        low, high = (end.clone() for end in self.rotate(self.x, self.recipe))
        low[:, -self.group :] = high[:, -self.group :] = self.x[:, -self.group :]
        return low, high

    def along_rows(self) -> Ends:
        """Ends of rotated groups of rows."""
        low, high = self.rotate(self.x.T.contiguous(), self.recipe)
        return low.T.contiguous(), high.T.contiguous()


def _other_groups(r: Rotation) -> dict[str, int]:
    return {str(group): group for group in RHT_GROUPS if group != r.group and r.x.shape[1] % group == 0}


def _same_signs_everywhere(r: Rotation) -> bool:
    """Whether signs along the row are those in groups."""
    return not (r.group < 16 and r.x.shape[1] > r.group)


_FACTOR = "the rotation lacks its factor {1:g}"


def _factor(r: Rotation) -> dict[str, float]:
    return {"": coefficient(r.group)}


ROTATIONS: tuple[Deviation[Rotation], ...] = (
    Deviation("rotation-missing", "elements are not rotated", "rotation", lambda r: (r.x, r.x)),
    Deviation("rotation-without-signs", "the rotation lacks its signs", "rotation", lambda r: r.with_fields(signs=0)),
    Deviation("rotation-signs:negated", "the rotation has its signs, all of them negated", "rotation",
              lambda r: r.with_fields(signs=r.by.signs ^ _MASK)),
    Deviation("rotation-signs:reversed", "the rotation has its signs, in reverse order", "rotation",
              lambda r: r.with_fields(signs=int(f"{r.by.signs:016b}"[::-1], 2))),
    Deviation("rotation-signs:te", "the rotation has signs, those of Transformer Engine", "rotation",
              lambda r: r.with_fields(signs=RHT_SIGNS), when=lambda r: not r.by.signs),
    Deviation("rotation-signs-along-row", "signs are counted along the row, and not in groups of {}", "rotation",
              lambda _, r: r.along_row(), lambda r: {} if _same_signs_everywhere(r) else {str(r.group): r.group}),
    Deviation("rotation-signs-after", "the signs are applied after the rotation, not before", "rotation",
              lambda r: r.signs_after()),
    Deviation("rotation-without-factor", _FACTOR, "rotation", lambda _, r: r.without_factor(), _factor,
              when=lambda r: _is_factor_exact(r.group)),
    Deviation("rotation-last-group-skipped", "the last {} elements of each row are not rotated", "rotation",
              lambda _, r: r.last_skipped(), lambda r: {str(r.group): r.group}),
    Deviation("rotation-group:{}", "groups of {0} are rotated, not of {1[1]}", "rotation",
              lambda groups, r: r.with_fields(group=groups[0]),
              lambda r: {name: (group, r.group) for name, group in _other_groups(r).items()}),
    Deviation("rotation-of-columns", "groups of {} rows are rotated, not of columns", "rotation",
              lambda _, r: r.along_rows(), lambda r: {str(r.group): r.group}, row_local=False,
              when=lambda r: r.x.shape[0] % r.group == 0),
)  # fmt: skip
"""Wrong rotations that are correct rotations of a different matrix, or with a different recipe: functions to the ends
(M, K) of the rotated elements."""
SUMS: tuple[Deviation[Rotation], ...] = (
    Deviation("rotation-without-factor", _FACTOR, "rotation", lambda _, r: _sums(r, 1.0).bfloat16(), _factor,
              when=lambda r: not _is_factor_exact(r.group)),
    Deviation("rotation-stage-missing", "the {} stage of the rotation's sums is missing", "rotation",
              lambda distance, r: _sums(r, skipped_distance=distance).bfloat16(),
              lambda r: {"last": r.group // 2, "first": 1}),
    Deviation("rotation-not-rounded", "rotated elements are not rounded to bfloat16", "rotation",
              lambda r: _sums(r, None)),
    Deviation("rotation-truncated", "rotated elements are truncated to bfloat16, not rounded", "rotation",
              lambda r: (_sums(r).view(torch.int32) & ~_MASK).view(torch.float32).bfloat16()),
    Deviation("rotation-through-bf16", "the rotation adds in bfloat16, not in float32", "rotation",
              lambda r: _sums(r, stage_dtype=torch.bfloat16).bfloat16()),
)  # fmt: skip
"""Wrong rotations that add in the order of `reference.quantize.hadamard`: functions to the rotated matrix (M, K),
bfloat16, but float32 for `rotation-not-rounded`."""


def deviating_rotations(rotation: Rotation) -> Iterator[Deviation[Rotation]]:
    """Wrong rotations with `in_order`; `change` gives the rotated matrix (M, K).

    Several can give the same bytes, such as two changes of a sign mask that has no signs.
    """
    for row in rows_of(ROTATIONS, rotation):
        yield row.through(lambda ends, r: ends(r)[0])
    yield from rows_of(SUMS, rotation)


def _is_factor_exact(group: int) -> bool:
    """Whether the factor of a group is a power of two, with exact divisions."""
    return frexp(coefficient(group))[0] == 0.5


def _sums(
    r: Rotation,
    factor: float | None = None,
    stage_dtype: torch.dtype = torch.float32,
    skipped_distance: int | None = None,
) -> torch.Tensor:
    """Sums of the rotation before the final rounding, float32 (M, K).

    `factor`: replaces the factor of the recipe. `stage_dtype`: every stage of additions is rounded to this dtype.
    `skipped_distance`: the stage that adds elements at this distance is left out.
    """
    factors = signs(r.by) * (coefficient(r.group) if factor is None else factor)
    y = r.x.contiguous().float() * factors.to(r.x.device).repeat(r.x.shape[1] // r.group)
    distance = 1
    while distance < r.group:
        if distance != skipped_distance:
            y = butterfly(y, distance).to(stage_dtype).float()
        distance *= 2
    return y


def wrong_rotations(
    x: torch.Tensor, output: torch.Tensor, recipe: Recipe, free: bool, stage: StageResult, limit: Limit
) -> Iterator[Cause]:
    """Wrong rotations that give the result (M, K): tried first on the rows of the first wrong element. `free`: whether
    the order of the additions is free."""
    rows = _tile_of_first_wrong(x, recipe, stage.wrong_elements)
    rotate = _ends_of_any_order if free else in_order
    tile, whole = Rotation(x[rows], recipe, rotate), Rotation(x, recipe, rotate)
    tables = [rows_of(ROTATIONS, each) if free else deviating_rotations(each) for each in (tile, whole)]
    gives = _contains if free else equal_bits
    for of_tile, row in zip(*tables, strict=True):
        if (
            limit.may_try(tile.x.numel())
            and gives(of_tile.result(tile), output[rows])
            and limit.may_verify(row.cause, x.numel())
            and gives(row.result(whole), output)
        ):
            yield row.cause, row.sentence


def _ends_of_any_order(matrix: torch.Tensor, recipe: Recipe) -> Ends:
    interval = rotated_interval(matrix, recipe)
    return interval.lower, interval.upper


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


def _contains(ends: Ends, output: torch.Tensor) -> bool:
    """Whether every output lies between its ends, or is NaN like the lower end."""
    low, high = ends
    ordinals = ordinal.signed_float_ordinals(output)
    inside = (ordinals >= ordinal.signed_float_ordinals(low)) & (ordinals <= ordinal.signed_float_ordinals(high))
    return bool((inside | (output.isnan() & low.isnan())).all())
