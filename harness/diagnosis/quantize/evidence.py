"""What there is to explain: one quantized matrix as its kernel left it, along the rows that are quantized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from narrowgauge.harness.operations.stages.quantized import Judged, Subject, stored_along_rows
from narrowgauge.reference.quantize.layout import linear_scales
from narrowgauge.spec.quantized import Quantized

STAGES = ("amax", "tensor scale", "layout", "scales", "codes")
"""Stages of a quantized matrix, in order."""
OF_ROWS = ("scales", "codes")
"""Stages whose rows, those of a tile together, follow from the same rows of the matrix and the stages before."""
SLAB = 1 << 17
"""Elements that are looked at together: their temporaries stay in a cache."""


@dataclass
class Evidence:
    """A matrix, how it was to be quantized, and what a kernel made of it."""

    subject: Subject
    shown: dict[str, torch.Tensor]
    """By stage, what the kernel gave, codes and scales along rows; a stage that it does not show is not here."""
    amax: torch.Tensor | None
    """The reference's amax, for a kernel that shows none."""
    encode: torch.Tensor | None
    """The tensor's scale where it was given."""
    kernel: Quantized
    """All of it, as the kernel gave it."""

    @property
    def elements(self) -> int:
        """Elements of the matrix."""
        return prod(self.subject.matrix.shape)

    @property
    def height(self) -> int:
        """Rows that follow from each other: those of a tile."""
        recipe = self.subject.recipe
        return 1 if recipe.whole else recipe.block[0]

    def rows(self, stage: str, row: int) -> slice:
        """A few rows of the matrix, whole tiles, among them that of row `row` of a stage `OF_ROWS`."""
        stored = self.subject.recipe.stored_rows if stage == "scales" and not self.subject.recipe.whole else 1
        start = row * stored // self.height * self.height
        return slice(start, min(start + self.height, self.subject.matrix.shape[0]))

    def slabs(self) -> Iterator[slice]:
        """All rows, in runs of whole tiles of about `SLAB` elements."""
        rows, columns = self.subject.matrix.shape
        step = max(1, SLAB // max(1, columns * self.height)) * self.height
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    def of(self, rows: slice) -> Evidence:
        """The same of some rows, whole tiles, alone; the stages of the tensor stay as they are."""
        subject, recipe = self.subject, self.subject.recipe
        count, columns = subject.matrix.shape
        if rows == slice(0, count):
            return self
        first = subject.first if recipe.whole else subject.first + rows.start * -(-columns // recipe.block[1])
        random = subject.random[rows] if isinstance(subject.random, torch.Tensor) else subject.random
        shown = {}
        for stage, tensor in self.shown.items():
            if stage == "codes":
                shown[stage] = tensor[rows]
            elif stage == "scales" and not recipe.whole:
                shown[stage] = tensor[rows.start // recipe.stored_rows : -(-rows.stop // recipe.stored_rows)]
            elif stage in ("amax", "tensor scale"):
                shown[stage] = _of_rows(tensor, rows)
            elif stage == "scales":
                shown[stage] = tensor
        part = replace(subject, matrix=subject.matrix[rows], first=first, random=random)
        amax, encode = (None if each is None else _of_rows(each, rows) for each in (self.amax, self.encode))
        return Evidence(part, shown, amax, encode, self.kernel)


def _of_rows(numbers: torch.Tensor, rows: slice) -> torch.Tensor:
    return numbers[rows] if len(numbers) > 1 else numbers


def evidence(judged: Judged) -> Evidence:
    """What a judged matrix leaves to explain."""
    given, subject = judged.given, judged.subject
    shown = {"scales": linear_scales(judged.kernel), "codes": stored_along_rows(given)}
    if given.swizzled:
        shown["layout"] = given.scales
    if judged.oracle.amax is not None and judged.oracle.tensor_scale is not None:
        if given.amax is not None:
            shown["amax"] = given.amax
        if given.tensor_scale is not None:
            shown["tensor scale"] = given.tensor_scale
    encode = judged.oracle.tensor_scale if subject.recipe.tensor_scale == "given" else None
    return Evidence(subject, shown, judged.oracle.amax, encode, given)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, byte for byte, a NaN being any NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return not bool(different(one, other).any())


def different(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """bool: where two tensors of one shape differ in a byte, a NaN being any NaN."""
    if not one.is_floating_point():
        return one != other
    bits = one.contiguous().view(torch.int32) != other.contiguous().view(torch.int32)
    return bits & ~(one.isnan() & other.isnan())
