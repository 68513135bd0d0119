"""Mistakes in the rotation of a matrix before it is quantized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.operations.transform.deviations import deviating_rotations
from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.quantize.hadamard import transform
from narrowgauge.reference.quantize.steps import block_amaxes, row_amax
from narrowgauge.spec.formats import E4M3
from narrowgauge.spec.recipes import RHT_SIGNS, Hadamard, Recipe, find_recipe

_ROTATING_RECIPE = find_recipe("nvfp4-rht")
_STAGES = frozenset({"amax", "scales", "codes"})


def rotation_deviations(recipe: Recipe, matrix: torch.Tensor) -> Iterator[QuantizeDeviation]:
    """Deviations of the rotation of `matrix` (M, K), and amaxes before the rotation. The most plausible first."""
    if recipe.transform is None:
        yield from _unwanted_rotation_deviations(recipe, matrix)
        return
    for cause, sentence, _ in deviating_rotations(matrix, recipe):
        yield QuantizeDeviation(
            cause, sentence, _STAGES, overrides={"x": partial(_rotate, cause)}, row_local=cause != "rotation-of-columns"
        )
    yield QuantizeDeviation(
        "amax-before-transform", "the amax of the tensor is that before the rotation", frozenset({"amax"}),
        overrides={"amax": lambda replay: _amax(block_amaxes(replay.matrix, replay.recipe), replay.recipe)},
    )  # fmt: skip
    yield QuantizeDeviation(
        "block-amax-before-transform", "block amaxes are those before the rotation", frozenset({"scales"}),
        overrides={"blocks": lambda replay: block_amaxes(replay.matrix, replay.recipe)},
        optional_stages=frozenset({"amax"}),
    )  # fmt: skip
    yield QuantizeDeviation(
        "rotation-missing", "codes are of elements that are not rotated", frozenset({"codes"}),
        overrides={"x": lambda replay: replay.matrix},
    )  # fmt: skip


def _rotate(cause: str, replay: Replay) -> torch.Tensor:
    for name, _, rotate in deviating_rotations(replay.matrix, replay.recipe):
        if name == cause:
            return rotate()
    raise ValueError(f"{cause} does not apply to {tuple(replay.matrix.shape)}")


def _amax(blocks: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    return tensor_amax(blocks) if recipe.granularity == "tensor" else row_amax(blocks)


def _unwanted_rotation_deviations(recipe: Recipe, matrix: torch.Tensor) -> Iterator[QuantizeDeviation]:
    """A rotation, for a recipe without a rotation."""
    group = Hadamard().group
    if recipe.scale is not E4M3 or matrix.dtype != torch.bfloat16 or matrix.shape[1] % group:
        return
    for signs, phrase in ((RHT_SIGNS, ""), (0, ", without signs")):
        rotation = replace(_ROTATING_RECIPE, transform=Hadamard(group, signs))
        yield QuantizeDeviation(
            "rotation-not-wanted", f"elements are rotated{phrase}", _STAGES,
            overrides={"x": partial(_rotate_unwanted, rotation)},
        )  # fmt: skip


def _rotate_unwanted(rotation: Recipe, replay: Replay) -> torch.Tensor:
    return transform(replay.matrix, rotation)
