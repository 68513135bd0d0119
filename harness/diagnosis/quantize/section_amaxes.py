"""Amaxes of the wrong section in a grouped quantization, and given amaxes that are stored and not used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.quantize.scaling import tensor_scale
from narrowgauge.reference.quantize.steps import row_amax


def section_amax_deviations(matrices: Sequence[KernelMatrix]) -> Iterator[QuantizeDeviation]:
    """All sections quantized with the amax of the first section. Only for several sections with their own amaxes."""
    recipe = matrices[0].subject.recipe
    if len(matrices) == 1 or recipe.granularity != "tensor" or recipe.tensor_scale in ("none", "given"):
        return
    first_amax = Replay(matrices[0]).amax
    assert first_amax is not None
    for phrase, amax in (("", first_amax), (", which is empty", torch.zeros_like(first_amax))):
        yield QuantizeDeviation(
            "amax-of-first-section", f"every section is quantized with the amax of the first{phrase}",
            frozenset({"scales", "codes"}),
            overrides={stage: partial(_stage_with_amax, amax, stage) for stage in ("scales", "codes")},
        )  # fmt: skip


def unused_amax_deviations(matrix: KernelMatrix) -> Iterator[QuantizeDeviation]:
    """A given amax that the kernel returns, while it quantizes with the amax of the matrix."""
    if matrix.subject.amax_given:
        yield QuantizeDeviation(
            "given-amax-ignored", "the matrix is quantized with its own amax, not with the given one",
            frozenset({"scales", "codes"}),
            overrides={stage: partial(_stage_with_own_amax, stage) for stage in ("scales", "codes")}, row_local=False,
        )  # fmt: skip


def _stage_with_own_amax(stage: str, replay: Replay) -> torch.Tensor:
    blocks = replay.blocks
    own = tensor_amax(blocks) if replay.recipe.granularity == "tensor" else row_amax(blocks)
    return _stage_with_amax(own, stage, replay)


def _stage_with_amax(amax: torch.Tensor, stage: str, replay: Replay) -> torch.Tensor:
    """The stage, computed with `amax` instead of the kernel's amax."""
    section_replay = Replay(replay.kernel_matrix)
    section_replay.amax = amax
    section_replay.tensor_scale = tensor_scale(amax, replay.recipe, replay.x.dtype)
    return section_replay.compute_stage(stage)
