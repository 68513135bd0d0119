"""A quantized matrix as the kernel left it: stages along the quantized rows, input of the diagnosis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from narrowgauge.harness.checks.bit_equality import same_bytes
from narrowgauge.harness.operations.stages.quantized import Judged, Subject, stored_along_rows
from narrowgauge.reference.quantize.layout import linear_scales
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.scale_layouts import LINEAR

STAGES = ("amax", "tensor scale", "layout", "scales", "codes")
"""Stages of a quantized matrix, in order."""
ROW_STAGES = ("scales", "codes")
"""Stages with rows. The rows of a tile depend on the same rows of the matrix and on the stages before."""
SLAB_ELEMENTS = 1 << 17
"""Elements of a slab. The temporaries of a slab fit into the cache."""


@dataclass
class KernelMatrix:
    """A matrix, its recipe, and the stages of the kernel's result."""

    subject: Subject
    kernel_stages: dict[str, torch.Tensor]
    """Results of the kernel by stage; codes and linear scales along rows. A stage that the kernel hides is missing."""
    reference_amax: torch.Tensor | None
    """The reference's amax, for a kernel that reports none."""
    given_tensor_scale: torch.Tensor | None
    """Tensor scale, if it is an input of the recipe."""
    result: Quantized
    """The whole result of the kernel."""
    right_codes: bool = False
    """Whether the codes are those of the right scales, whatever scales the kernel stored."""
    other_half: Quantized | None = None
    """The kernel's other half of the same matrix."""

    @property
    def element_count(self) -> int:
        """Number of elements of the matrix."""
        return prod(self.subject.matrix.shape)

    @property
    def tile_height(self) -> int:
        """Rows of a tile. They depend on each other."""
        recipe = self.subject.recipe
        return 1 if recipe.whole else recipe.block[0]

    def tile_rows(self, stage: str, row: int) -> slice:
        """Rows of the matrix in the tile of row `row` of a stage in `ROW_STAGES`."""
        stored_rows = self.subject.recipe.stored_rows if stage == "scales" and not self.subject.recipe.whole else 1
        start = row * stored_rows // self.tile_height * self.tile_height
        return slice(start, min(start + self.tile_height, self.subject.matrix.shape[0]))

    def slabs(self) -> Iterator[slice]:
        """All rows as slabs of whole tiles, with about `SLAB_ELEMENTS` elements each."""
        rows, columns = self.subject.matrix.shape
        step = max(1, SLAB_ELEMENTS // max(1, columns * self.tile_height)) * self.tile_height
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    def select_rows(self, rows: slice) -> KernelMatrix:
        """The matrix with only these rows (whole tiles). Amax and scale of the tensor are unchanged."""
        subject, recipe = self.subject, self.subject.recipe
        count, columns = subject.matrix.shape
        if rows == slice(0, count):
            return self
        first = subject.first if recipe.whole else subject.first + rows.start * -(-columns // recipe.block[1])
        random = subject.random[rows] if isinstance(subject.random, torch.Tensor) else subject.random
        selected = {}
        for stage, tensor in self.kernel_stages.items():
            if stage == "codes":
                selected[stage] = tensor[rows]
            elif stage == "scales" and not recipe.whole:
                selected[stage] = tensor[rows.start // recipe.stored_rows : -(-rows.stop // recipe.stored_rows)]
            elif stage in ("amax", "tensor scale"):
                selected[stage] = _select_numbers(tensor, rows)
            elif stage == "scales":
                selected[stage] = tensor
        part = replace(subject, matrix=subject.matrix[rows], first=first, random=random)
        amax, tensor_scale = (
            None if numbers is None else _select_numbers(numbers, rows)
            for numbers in (self.reference_amax, self.given_tensor_scale)
        )
        return KernelMatrix(part, selected, amax, tensor_scale, self.result, self.right_codes)


def _select_numbers(numbers: torch.Tensor, rows: slice) -> torch.Tensor:
    return numbers[rows] if len(numbers) > 1 else numbers


def _other_half(judged: Judged, every: Sequence[Judged]) -> Quantized | None:
    """The result among `every` whose matrix is the transpose of the judged one, of the same recipe."""
    halves = [other for other in every if other.prefix != judged.prefix] if judged.subject.matrix.numel() else []
    transpose = judged.subject.matrix.T.contiguous() if halves else judged.subject.matrix
    for other in halves:
        same_recipe = other.subject.recipe.element == judged.subject.recipe.element
        if same_recipe and same_bytes(other.subject.matrix, transpose):
            return other.given
    return None


def kernel_matrix(judged: Judged, every: Sequence[Judged] = ()) -> KernelMatrix:
    """The stages that the kernel shows of a judged matrix. `every`: all judged matrices of the case."""
    result, subject = judged.given, judged.subject
    stages = {"scales": linear_scales(judged.kernel), "codes": stored_along_rows(result)}
    if result.scale_layout != LINEAR:
        stages["layout"] = result.scales
    if judged.oracle.amax is not None and judged.oracle.tensor_scale is not None:
        if result.amax is not None:
            stages["amax"] = result.amax
        if result.tensor_scale is not None:
            stages["tensor scale"] = result.tensor_scale
    tensor_scale = judged.oracle.tensor_scale if subject.recipe.tensor_scale == "given" else None
    right_codes = torch.equal(stages["codes"], stored_along_rows(judged.oracle))
    other_half = _other_half(judged, every)
    return KernelMatrix(subject, stages, judged.oracle.amax, tensor_scale, result, right_codes, other_half)
