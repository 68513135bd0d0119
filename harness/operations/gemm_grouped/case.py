"""Cases of gemm-grouped: every section of rows has its own w."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from narrowgauge.harness.cases.keys import SectionsText, Switch
from narrowgauge.harness.cases.methods import Method
from narrowgauge.harness.cases.sections import section_sizes
from narrowgauge.harness.operations.gemm.case import ProductCase, product_problem
from narrowgauge.harness.operations.quantize.case import sections_problem
from narrowgauge.spec.recipes import find_recipe


@dataclass(frozen=True, kw_only=True)
class GroupedGemmCase(ProductCase):
    """quantize_grouped of x, quantize of w for every section, and gemm_grouped."""

    operation: ClassVar[str] = "gemm-grouped"
    methods: ClassVar[Mapping[str, Method]] = dict.fromkeys(
        ("gemm_grouped", "pad_sections", "unpad_sections"), Method()
    )
    seconds: ClassVar[tuple[float, float]] = (13e-3, 140e-9)

    sections: SectionsText
    """Kind and count of the sections of x, such as `even:4` (`harness.cases.sections`)."""
    padded: Switch = False
    """Whether all sections are first padded with rows of zeros to the row alignment of the recipe."""

    @property
    def section_sizes(self) -> tuple[int, ...]:
        return section_sizes(self.sections, self.shape[0])

    def problem(self) -> str | None:
        for recipe in self.operand_recipes:
            if recipe.transform:
                return f"recipe {recipe} rotates columnwise operands; those of a {self.operation} are rowwise"
        return product_problem(*self.recipe_names) or sections_problem(
            find_recipe(self.recipe), self.sections, self.shape[0]
        )

    @property
    def native_sources(self) -> frozenset[str]:
        return super().native_sources | ({"pad"} if self.padded else frozenset())

    def stages(self) -> tuple[str, ...]:
        *operands, output = super().stages()
        return ("padding", *operands, "rows", output, "unpadding") if self.padded else (*operands, output)

    @classmethod
    def stage_names(cls) -> tuple[str, ...]:
        return (*super().stage_names(), "padding", "rows", "unpadding", "unpadded")
