"""Matrices with the amax or the result of another section or half, and unused given amaxes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.harness.operations.stages.quantized import stored_along_rows
from narrowgauge.reference.quantize.dequantize import dequantize
from narrowgauge.reference.quantize.layout import elements
from narrowgauge.spec.quantized import Quantized

OF_FIRST: QuantizeDeviation = Deviation(
    "amax-of-first-section", "every section is quantized with the amax of the first{}", "used amax",
    lambda amax, r: amax, of_case=True,
)  # fmt: skip
OF_ALL: QuantizeDeviation = Deviation(
    "amax-of-all-sections", "the amax of every section is that of all sections together", "amax",
    lambda amax, r: amax, of_case=True,
)  # fmt: skip
OF_NEIGHBOUR: QuantizeDeviation = Deviation(
    "section-of-neighbour", "every section holds the quantized matrix of the {} one", "matrix",
    lambda others, r: others[id(r.kernel_matrix)], row_local=False, of_case=True,
)  # fmt: skip
UNUSED: QuantizeDeviation = Deviation(
    "given-amax-ignored", "the matrix is quantized with its own amax, not with the given one", "used amax",
    lambda r: r.correct_amax, row_local=False,
)  # fmt: skip


def _other_half(r: Replay) -> Quantized:
    half = r.kernel_matrix.other_half
    assert half is not None
    return half


def _decoded_half(dtype: str, r: Replay) -> KernelMatrix:
    """The matrix with the decoded values of the other half in place of its elements."""
    matrix = r.kernel_matrix
    values = (
        dequantize(_other_half(r)).T.to(matrix.subject.matrix.dtype if dtype == "of x" else torch.float32).contiguous()
    )
    return replace(matrix, subject=replace(matrix.subject, matrix=values))


def _codes_of_half(r: Replay) -> torch.Tensor:
    other = _other_half(r)
    return elements(stored_along_rows(other), r.x.shape[0], other.recipe).T.contiguous()


HALVES: tuple[QuantizeDeviation, ...] = (
    Deviation("quantized-twice", "a half is made of the other one's decoded values{}", "matrix", _decoded_half,
              {"": "of x", " in float32": "float32"}, stages=frozenset({"scales", "codes"}),
              optional_stages=frozenset({"amax", "tensor scale"}), row_local=False),
    Deviation("codes-of-other-half", "a half has the codes of the other one, transposed", "element codes",
              _codes_of_half, row_local=False),
)  # fmt: skip
"""Halves of a matrix, made by one call, that depend on each other."""


def half_deviations(matrices: Sequence[KernelMatrix]) -> Iterator[QuantizeDeviation]:
    """Deviations of a half that is made of the other one. None if the kernel gives one half alone."""
    if all(matrix.other_half is not None for matrix in matrices):
        yield from rows_of(HALVES, matrices[0].subject.recipe)


def section_amax_deviations(matrices: Sequence[KernelMatrix]) -> Iterator[QuantizeDeviation]:
    """All sections with the amax of all together, or quantized with that of the first. Only for several sections with
    their own amaxes."""
    recipe = matrices[0].subject.recipe
    if len(matrices) == 1 or recipe.granularity != "tensor" or recipe.tensor_scale in ("none", "given"):
        return
    yield OF_ALL.bound("", _of_all(matrices))
    first_amax = Replay(matrices[0]).amax
    assert first_amax is not None
    yield OF_FIRST.bound("", first_amax)
    yield OF_FIRST.bound(", which is empty", torch.zeros_like(first_amax))


def _of_all(matrices: Sequence[KernelMatrix]) -> torch.Tensor:
    """The largest amax of all sections, (1,)."""
    return torch.stack([Replay(matrix).correct_amax for matrix in matrices]).nan_to_num(0.0).amax(0)


def share_amax(matrices: Sequence[KernelMatrix]) -> bool:
    """Whether several sections have the amax of all sections together, which is that of another tensor too."""
    if len(matrices) == 1 or matrices[0].subject.recipe.granularity != "tensor":
        return False
    together = _of_all(matrices)
    return all(torch.equal(matrix.kernel_stages["amax"], together) for matrix in matrices)


def section_result_deviations(matrices: Sequence[KernelMatrix]) -> Iterator[QuantizeDeviation]:
    """Sections that hold the quantized matrix of another section. None if the sections have different shapes."""
    if len(matrices) == 1 or len({matrix.subject.matrix.shape for matrix in matrices}) > 1:
        return
    last = len(matrices) - 1
    for phrase, source in (
        ("first", [0] * len(matrices)), ("previous", [max(number - 1, 0) for number in range(last + 1)]),
        ("next", [min(number + 1, last) for number in range(last + 1)]),
    ):  # fmt: skip
        if _differ(matrices, source):
            others = {id(matrix): matrices[number] for matrix, number in zip(matrices, source, strict=True)}
            yield replace(OF_NEIGHBOUR.bound(phrase, others), stages=frozenset(matrices[0].kernel_stages))


def _differ(matrices: Sequence[KernelMatrix], source: Sequence[int]) -> bool:
    """Whether the matrix of some section differs from the matrix of its source."""
    return any(
        not equal_bits(matrix.subject.matrix, matrices[number].subject.matrix)
        for matrix, number in zip(matrices, source, strict=True)
    )


def unused_amax_deviations(matrix: KernelMatrix) -> Iterator[QuantizeDeviation]:
    """A given amax that the kernel returns, while it quantizes with the amax of the matrix."""
    if matrix.subject.amax_given:
        yield UNUSED
