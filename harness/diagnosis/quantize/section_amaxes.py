"""Sections of a grouped quantization with the amax or the result of another section, and unused given amaxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from narrowgauge.harness.checks.bit_equality import equal_bits
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
            overrides={stage: partial(_stage_with_amax, amax, stage) for stage in ("scales", "codes")}, of_case=True,
        )  # fmt: skip


def section_result_deviations(matrices: Sequence[KernelMatrix]) -> Iterator[QuantizeDeviation]:
    """Sections that hold the quantized matrix of another section. None if the sections have different shapes."""
    if len(matrices) == 1 or len({matrix.subject.matrix.shape for matrix in matrices}) > 1:
        return
    stages = frozenset(matrices[0].kernel_stages)
    last = len(matrices) - 1
    for phrase, source in (
        ("first", [0] * len(matrices)), ("previous", [max(number - 1, 0) for number in range(last + 1)]),
        ("next", [min(number + 1, last) for number in range(last + 1)]),
    ):  # fmt: skip
        if not _differ(matrices, source):
            continue
        others = {id(matrix): matrices[number] for matrix, number in zip(matrices, source, strict=True)}
        yield QuantizeDeviation(
            "section-of-neighbour", f"every section holds the quantized matrix of the {phrase} one", stages,
            overrides={stage: partial(_stage_of_section, others, stage) for stage in stages}, row_local=False,
            of_case=True,
        )  # fmt: skip


def _differ(matrices: Sequence[KernelMatrix], source: Sequence[int]) -> bool:
    """Whether the matrix of some section differs from the matrix of its source."""
    return any(
        not equal_bits(matrix.subject.matrix, matrices[number].subject.matrix)
        for matrix, number in zip(matrices, source, strict=True)
    )


def _stage_of_section(others: Mapping[int, KernelMatrix], stage: str, replay: Replay) -> torch.Tensor:
    """The stage of the section whose result `replay`'s section holds."""
    return Replay(others[id(replay.kernel_matrix)]).compute_stage(stage)


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
