"""What kernels quantize in place of the matrix that their recipe rotates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from narrowgauge.harness.diagnosis.auxiliary.rotations import deviating_rotations
from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Run
from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.quantize.hadamard import transform
from narrowgauge.reference.quantize.steps import block_amaxes, row_amax
from narrowgauge.spec.formats import E4M3
from narrowgauge.spec.recipes import RHT_SIGNS, Hadamard, Recipe, find_recipe

_ROTATING = find_recipe("nvfp4-rht")
_ALL = frozenset({"amax", "scales", "codes"})


def rotating_deviations(recipe: Recipe, matrix: torch.Tensor) -> Iterator[QuantizeDeviation]:
    """Deviations of a recipe's rotation of `matrix` (M, K), and of what its amaxes are of, the most plausible first."""
    if recipe.transform is None:
        yield from _unwanted(recipe, matrix)
        return
    for cause, sentence, _ in deviating_rotations(matrix, recipe):
        yield QuantizeDeviation(
            cause, sentence, _ALL, hooks={"x": partial(_rotated, cause)}, local=cause != "rotation-of-columns"
        )
    yield QuantizeDeviation(
        "amax-before-transform", "the amax of the tensor is that before the rotation", frozenset({"amax"}),
        hooks={"amax": lambda run: _amax(block_amaxes(run.matrix, run.recipe), run.recipe)},
    )  # fmt: skip
    yield QuantizeDeviation(
        "block-amax-before-transform", "block amaxes are those before the rotation", frozenset({"scales"}),
        hooks={"blocks": lambda run: block_amaxes(run.matrix, run.recipe)}, lenient=frozenset({"amax"}),
    )  # fmt: skip
    yield QuantizeDeviation(
        "rotation-missing", "codes are of elements that are not rotated", frozenset({"codes"}),
        hooks={"x": lambda run: run.matrix},
    )  # fmt: skip


def _rotated(cause: str, run: Run) -> torch.Tensor:
    for name, _, rotate in deviating_rotations(run.matrix, run.recipe):
        if name == cause:
            return rotate()
    raise ValueError(f"{cause} does not apply to {tuple(run.matrix.shape)}")


def _amax(blocks: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    return tensor_amax(blocks) if recipe.granularity == "tensor" else row_amax(blocks)


def _unwanted(recipe: Recipe, matrix: torch.Tensor) -> Iterator[QuantizeDeviation]:
    """A rotation that the recipe does not have."""
    group = Hadamard().group
    if recipe.scale is not E4M3 or matrix.dtype != torch.bfloat16 or matrix.shape[1] % group:
        return
    for signs, words in ((RHT_SIGNS, ""), (0, ", without signs")):
        rotation = replace(_ROTATING, transform=Hadamard(group, signs))
        yield QuantizeDeviation(
            "rotation-not-wanted", f"elements are rotated{words}", _ALL,
            hooks={"x": partial(_unwanted_rotation, rotation)},
        )  # fmt: skip


def _unwanted_rotation(rotation: Recipe, run: Run) -> torch.Tensor:
    return transform(run.matrix, rotation)
