"""Mistakes in the rotation of a matrix before it is quantized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.harness.operations.transform.deviations import Rotation, deviating_rotations, in_order
from narrowgauge.reference.quantize.hadamard import transform
from narrowgauge.reference.quantize.steps import block_amaxes
from narrowgauge.spec.formats import E4M3
from narrowgauge.spec.recipes import RHT_SIGNS, Hadamard, Recipe, find_recipe

_ROTATION = Hadamard()
BEFORE_ROTATION: tuple[QuantizeDeviation, ...] = (
    Deviation("amax-before-transform", "the amax of the tensor is that before the rotation", "amax",
              lambda r: r.amax_of(block_amaxes(r.matrix, r.recipe))),
    Deviation("block-amax-before-transform", "block amaxes are those before the rotation", "blocks",
              lambda r: block_amaxes(r.matrix, r.recipe), stages=frozenset({"scales"}),
              optional_stages=frozenset({"amax"})),
    Deviation("rotation-missing", "codes are of elements that are not rotated", "x", lambda r: r.matrix,
              stages=frozenset({"codes"})),
)  # fmt: skip
"""Steps that take the matrix before the rotation."""
UNWANTED: QuantizeDeviation = Deviation(
    "rotation-not-wanted", "elements are rotated{}", "rotation",
    lambda signs, r: transform(r.matrix, replace(find_recipe("nvfp4-rht"), transform=replace(_ROTATION, signs=signs))),
    {"": RHT_SIGNS, ", without signs": 0},
)  # fmt: skip


def rotation_deviations(recipe: Recipe, matrix: torch.Tensor) -> Iterator[QuantizeDeviation]:
    """Deviations of the rotation of `matrix` (M, K), and amaxes before the rotation; for a recipe without a rotation a
    rotation. The most plausible first."""
    if recipe.transform is None:
        if recipe.scale is E4M3 and matrix.dtype == torch.bfloat16 and matrix.shape[1] % _ROTATION.group == 0:
            yield from UNWANTED.rows(recipe)
        return
    for row in deviating_rotations(Rotation(matrix, recipe, in_order)):
        yield row.through(lambda rotated, r: rotated(Rotation(r.matrix, r.recipe, in_order)))
    yield from BEFORE_ROTATION
