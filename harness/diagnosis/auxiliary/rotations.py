"""Rotations that kernels do in place of the Hadamard transform of their recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import frexp

import torch

from narrowgauge.reference.quantize.hadamard import butterfly, coefficient, signs, transform
from narrowgauge.spec.arguments import check_rotation
from narrowgauge.spec.recipes import RHT_GROUPS, RHT_SIGNS, Recipe

Ends = tuple[torch.Tensor, torch.Tensor]
"""The least and the greatest that each rotated element can be."""
Rotate = Callable[[torch.Tensor, Recipe], Ends]
_MASK = 0xFFFF
_FACTOR = "the rotation lacks its factor {:g}"


def deviating_rotations(x: torch.Tensor, recipe: Recipe) -> Iterator[tuple[str, str, Callable[[], torch.Tensor]]]:
    """`x` (M, K), bfloat16, rotated in known wrong ways, sums in the order of `reference.quantize.hadamard`.

    A cause, its sentence, and what makes the rotated matrix: bfloat16 (M, K), but float32 of `rotation-not-rounded`.
    Causes can have the same bytes: signs of a mask without any. Raises as `transform` does.
    """

    def rotate(matrix: torch.Tensor, matrix_recipe: Recipe) -> Ends:
        rotated = transform(matrix, matrix_recipe)
        return rotated, rotated

    for cause, sentence, ends in deviating_ends(x, recipe, rotate):
        yield cause, sentence, lambda ends=ends: ends()[0]  # type: ignore[misc]
    group = check_rotation(x, recipe).group
    if not _exact(group):
        yield "rotation-without-factor", _FACTOR.format(coefficient(group)), lambda: _sums(x, recipe, 1.0).bfloat16()
    for words, half in (("last", group // 2), ("first", 1)):
        yield (
            "rotation-stage-missing", f"the {words} stage of the rotation's sums is missing",
            lambda half=half: _sums(x, recipe, without=half).bfloat16(),  # type: ignore[misc]
        )  # fmt: skip
    yield "rotation-not-rounded", "rotated elements are not rounded to bfloat16", lambda: _sums(x, recipe)
    yield (
        "rotation-truncated", "rotated elements are truncated to bfloat16, not rounded",
        lambda: (_sums(x, recipe).view(torch.int32) & ~_MASK).view(torch.float32).bfloat16(),
    )  # fmt: skip
    yield (
        "rotation-through-bf16", "the rotation adds in bfloat16, not in float32",
        lambda: _sums(x, recipe, between=torch.bfloat16).bfloat16(),
    )  # fmt: skip


def deviating_ends(x: torch.Tensor, recipe: Recipe, rotate: Rotate) -> Iterator[tuple[str, str, Callable[[], Ends]]]:
    """The same where `rotate` says where a rotated matrix lies: those that are right rotations of something else."""
    rotation = check_rotation(x, recipe)
    group, mask = rotation.group, rotation.signs

    def of(**changes: int) -> Callable[[], Ends]:
        return lambda: rotate(x, replace(recipe, transform=replace(rotation, **changes)))

    yield "rotation-missing", "elements are not rotated", lambda: (x, x)
    yield "rotation-without-signs", "the rotation lacks its signs", of(signs=0)
    for name, other, words in (
        ("negated", mask ^ _MASK, "all of them negated"),
        ("reversed", int(f"{mask:016b}"[::-1], 2), "in reverse order"),
    ):
        yield f"rotation-signs:{name}", f"the rotation has its signs, {words}", of(signs=other)
    if not mask:
        yield "rotation-signs:te", "the rotation has signs, those of Transformer Engine", of(signs=RHT_SIGNS)

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

    if _exact(group):

        def without_factor() -> Ends:
            low, high = rotate(x, recipe)
            return low / coefficient(group), high / coefficient(group)

        yield "rotation-without-factor", _FACTOR.format(coefficient(group)), without_factor

    def last_skipped() -> Ends:
        low, high = (end.clone() for end in rotate(x, recipe))
        low[:, -group:] = high[:, -group:] = x[:, -group:]
        return low, high

    yield "rotation-last-group-skipped", f"the last {group} elements of each row are not rotated", last_skipped
    for other in RHT_GROUPS:
        if other != group and x.shape[1] % other == 0:
            yield (
                f"rotation-group:{other}", f"groups of {other} are rotated, not of {group}", of(group=other),
            )  # fmt: skip
    if x.shape[0] % group == 0:

        def along_rows() -> Ends:
            low, high = rotate(x.T.contiguous(), recipe)
            return low.T.contiguous(), high.T.contiguous()

        yield "rotation-of-columns", f"groups of {group} rows are rotated, not of columns", along_rows


def _exact(group: int) -> bool:
    """Whether the factor of a group is a power of two, so that dividing rotated numbers by it rounds nothing."""
    return frexp(coefficient(group))[0] == 0.5


def _sums(
    x: torch.Tensor,
    recipe: Recipe,
    factor: float | None = None,
    between: torch.dtype = torch.float32,
    without: int | None = None,
) -> torch.Tensor:
    """The rotation's sums before they are rounded, float32, with another factor; every stage rounds to `between`.

    `without`: how far the elements are apart that the stage adds which is left out.
    """
    rotation = check_rotation(x, recipe)
    factors = signs(rotation) * (coefficient(rotation.group) if factor is None else factor)
    y = x.contiguous().float() * factors.to(x.device).repeat(x.shape[1] // rotation.group)
    half = 1
    while half < rotation.group:
        if half != without:
            y = butterfly(y, half).to(between).float()
        half *= 2
    return y
