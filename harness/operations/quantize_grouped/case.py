"""Cases of quantize-grouped: every section of rows has its own amax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from narrowgauge.harness.cases.case import rotation_problem, view_problem
from narrowgauge.harness.cases.families import Kind
from narrowgauge.harness.cases.keys import Orientation, SectionsText, Shape, Switch, View, dims
from narrowgauge.harness.cases.methods import Method
from narrowgauge.harness.cases.sections import section_sizes
from narrowgauge.harness.operations.quantize.case import (
    QUANTIZED,
    MatrixCase,
    amax_problem,
    quantized_stages,
    quantizing_sources,
    sections_problem,
)
from narrowgauge.spec.quantized import Half
from narrowgauge.spec.recipes import Recipe, find_recipe


@dataclass(frozen=True, kw_only=True)
class GroupedQuantizeCase(MatrixCase):
    """quantize_grouped: every section of rows has its own amax."""

    operation: ClassVar[str] = "quantize-grouped"
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.QUANTIZED,)
    methods: ClassVar[Mapping[str, Method]] = {"quantize_grouped": Method()}
    seconds: ClassVar[tuple[float, float]] = (1e-3, 320e-9)
    bytes_per_element: ClassVar[int] = 66  # resident set on a CPU, 2^22 elements: 60

    shape: Annotated[Shape, dims("[M, K]", 2, 2)]
    sections: SectionsText
    """Kind and count of the sections, such as `even:4` (`harness.cases.sections`)."""
    usage: Orientation = "rowwise"
    """`columnwise` quantizes the physical transpose of every section."""
    view: View = "contiguous"
    amax: Switch = False
    """Whether the amax of every section is given."""

    @classmethod
    def usual_keys(cls, recipe: Recipe, dtype: str) -> dict[str, Any]:
        return super().usual_keys(recipe, dtype) | {"sections": "even:4"}

    @property
    def section_sizes(self) -> tuple[int, ...]:
        return section_sizes(self.sections, self.shape[0], whole=self._whole)

    @property
    def _whole(self) -> int:
        """Divisor of the rows of a section: a columnwise half is rotated in groups of rows."""
        recipe = find_recipe(self.recipe)
        return recipe.transform.group if recipe.transform and self.half is Half.COLUMN else 1

    def problem(self) -> str | None:
        recipe, (rows, columns) = find_recipe(self.recipe), self.shape
        extent, axis = (columns, "K") if self.usage == "rowwise" else (rows, "M")
        wrong = self._lost or view_problem(self.view, self.dtype) or (amax_problem(recipe) if self.amax else None)
        wrong = wrong or rotation_problem(recipe, [self.dtype], extent, axis)
        return wrong or sections_problem(recipe, self.sections, rows, whole=self._whole)

    @property
    def native_sources(self) -> frozenset[str]:
        return quantizing_sources(self.recipes[0], strided=True)

    def stages(self) -> tuple[str, ...]:
        return quantized_stages(self.recipes[0])

    @classmethod
    def stage_names(cls) -> tuple[str, ...]:
        return QUANTIZED
