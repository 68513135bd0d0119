"""Cases of moe-layer: a mixture of experts with SwiGLU, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from narrowgauge.harness.cases.families import Kind
from narrowgauge.harness.cases.keys import Flag, SectionsText, Shape, count, dims
from narrowgauge.harness.cases.layers import Layer, mixture
from narrowgauge.harness.cases.sections import division_problem, section_sizes
from narrowgauge.harness.operations.modules.case import ModuleCase


@dataclass(frozen=True, kw_only=True)
class MoeLayerCase(ModuleCase):
    """A mixture of experts: x (T, hidden), fc1 (2·ffn, hidden) and fc2 (hidden, ffn) of each expert."""

    operation: ClassVar[str] = "moe-layer"
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.LINEAR,)
    seconds: ClassVar[tuple[float, float]] = (300e-3, 200e-9)
    module: ClassVar[str] = "MoELayer"

    shape: Annotated[Shape, dims("[T, hidden, ffn]", 3, 3)]
    sections: SectionsText
    """Rows of each expert."""
    choices: Annotated[int, count("choices of a token", 64), Flag.NAMED] = 2
    dropped: Annotated[int, count("choices", 1 << 20), Flag.NAMED] = 0
    """Choices with the id −1, which have no row."""

    @property
    def outer(self) -> int:
        return self.shape[1]

    @property
    def routed(self) -> int:
        """Rows of all experts."""
        return self.rows * self.choices - self.dropped

    @property
    def section_sizes(self) -> tuple[int, ...]:
        return section_sizes(self.sections, self.routed)

    @property
    def layers(self) -> list[Layer]:
        return mixture(len(self.section_sizes), self.shape[1], self.shape[2])

    def problem(self) -> str | None:
        if self.routed < 0:
            return f"dropped is {self.dropped}; {self.rows} tokens have {self.rows * self.choices} choices"
        return super().problem() or division_problem(self.sections, self.routed)

    @property
    def work(self) -> int:
        return super().work * self.choices

    @property
    def memory(self) -> int:
        return super().memory * self.choices

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def _rotated_rows(self) -> int:
        return 0  # sections are padded to whole groups
