"""Cases of grouped-linear: a linear layer with a weight for each section."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from narrowgauge.harness.cases.families import Kind
from narrowgauge.harness.cases.keys import SectionsText, Shape, dims
from narrowgauge.harness.cases.layers import Layer
from narrowgauge.harness.cases.sections import division_problem, section_sizes
from narrowgauge.harness.operations.modules.case import ModuleCase


@dataclass(frozen=True, kw_only=True)
class GroupedLinearCase(ModuleCase):
    """A linear layer with a weight (N, K) for each section of x (M, K)."""

    operation: ClassVar[str] = "grouped-linear"
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.LINEAR,)
    seconds: ClassVar[tuple[float, float]] = (150e-3, 200e-9)
    module: ClassVar[str] = "GroupedLinear"

    shape: Annotated[Shape, dims("[M, K, N]", 3, 3)]
    sections: SectionsText

    @property
    def section_sizes(self) -> tuple[int, ...]:
        return section_sizes(self.sections, self.shape[0])

    @property
    def layers(self) -> list[Layer]:
        return [replace(layer, groups=len(self.section_sizes)) for layer in super().layers]

    def problem(self) -> str | None:
        return super().problem() or division_problem(self.sections, self.shape[0])

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def _rotated_rows(self) -> int:
        return 0  # sections are padded to whole groups
