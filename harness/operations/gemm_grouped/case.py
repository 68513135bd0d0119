"""Cases of gemm-grouped: every section of rows has its own w."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from narrowgauge.harness.cases.case import usual_block
from narrowgauge.harness.cases.keys import Flag, Named, SectionsText, Switch, count
from narrowgauge.harness.cases.methods import Method
from narrowgauge.harness.cases.sections import section_sizes
from narrowgauge.harness.operations.gemm.case import PRODUCT, ProductCase, product_problem
from narrowgauge.harness.operations.quantize.case import sections_problem
from narrowgauge.spec.modules.routing import ALIGNMENT
from narrowgauge.spec.recipes import Recipe, find_recipe


@dataclass(frozen=True, kw_only=True)
class GroupedGemmCase(ProductCase):
    """quantize_grouped of x, quantize of w for every section, and gemm_grouped."""

    operation: ClassVar[str] = "gemm-grouped"
    methods: ClassVar[Mapping[str, Method]] = {
        "gemm_grouped": PRODUCT, "pad_sections": Method(), "unpad_sections": Method(), "gemm_masked": PRODUCT,
        "gemm_contiguous": PRODUCT,
    }  # fmt: skip
    seconds: ClassVar[tuple[float, float]] = (13e-3, 140e-9)

    sections: SectionsText
    """Kind and count of the sections of x, such as `even:4` (`harness.cases.sections`)."""
    padded: Switch = False
    """Whether all sections are first padded with rows of zeros to the row alignment of the recipe."""
    grouping: Annotated[Literal["sections", "contiguous", "psum", "indptr", "masked", "sorted-ids"], Flag.CHANGED] = (
        "sections"
    )
    """How the rows lie in memory: sections in sequence, or in a buffer (`spec.modules.routing.Grouping`)."""
    alignment: Annotated[int, count("rows", 1 << 20), Named("row-alignment"), Flag.NAMED] = ALIGNMENT
    """Rows of which the first row of a section in a buffer is a multiple."""

    @classmethod
    def usual_shapes(cls, recipe: Recipe) -> list[tuple[int, ...]]:
        # Four sections of whole tiles, and sections with a tail.
        width, rows = usual_block(recipe)[1], 4 * max(recipe.row_alignment, recipe.stored_rows)
        partial = (rows, 2 * width + width // 2, 40)
        return [(rows, max(256, 2 * width), 48), (4 * recipe.stored_rows, width, 16), (33, 3 * width, 17), partial]

    @classmethod
    def usual_keys(cls, recipe: Recipe, dtype: str) -> dict[str, Any]:
        return super().usual_keys(recipe, dtype) | {"sections": "even:4"}

    @property
    def section_sizes(self) -> tuple[int, ...]:
        return section_sizes(self.sections, self.shape[0])

    def problem(self) -> str | None:
        for recipe in self.operand_recipes:
            if recipe.transform:
                return f"recipe {recipe} rotates columnwise operands; those of a {self.operation} are rowwise"
        return (
            product_problem(*self.recipe_names)
            or sections_problem(find_recipe(self.recipe), self.sections, self.shape[0])
            or self._buffer_problem()
        )

    def _buffer_problem(self) -> str | None:
        """Why the rows cannot lie in a buffer, or None."""
        if self.grouping == "sections":
            return None if self.alignment == ALIGNMENT else "row-alignment is that of rows in a buffer; give a grouping"
        if self.padded or self.accumulate or self.bias:
            return f"grouping is {self.grouping!r}; leave padded, accumulate and bias out"
        recipe = self.operand_recipes[0]
        if recipe.stored_rows != 1 and not recipe.whole:
            return f"grouping is {self.grouping!r}, but recipe {recipe} shares scales among rows"
        return None if self.alignment else "row-alignment is 0; it is at least 1"

    @property
    def native_sources(self) -> frozenset[str]:
        grouped = set() if self.grouping == "sections" else {"group_rows", "store_words"}
        return super().native_sources | grouped | ({"pad"} if self.padded else set())

    def stages(self) -> tuple[str, ...]:
        *operands, output = super().stages()
        if self.grouping != "sections":
            return (*operands, output, *(() if self.grouping == "sorted-ids" else ("padding",)))
        return ("padding", *operands, "rows", output, "unpadding") if self.padded else (*operands, output)

    @classmethod
    def stage_names(cls) -> tuple[str, ...]:
        return (*super().stage_names(), "padding", "rows", "unpadding", "unpadded")
