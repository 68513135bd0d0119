"""Cases of gemm-quantized: a product with a quantized output, and beside it gemm and quantize of the output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from narrowgauge.harness.cases.axes import Axis, block_columns, block_rows
from narrowgauge.harness.cases.families import Family
from narrowgauge.harness.cases.keys import OutRecipeName
from narrowgauge.harness.cases.methods import Method
from narrowgauge.harness.operations.gemm.case import PRODUCT, GemmCase
from narrowgauge.harness.operations.quantize.case import NATIVE_NAMES, QUANTIZED, quantized_stages, quantizing_sources
from narrowgauge.spec.recipes import Recipe, find_recipe

MADE = ("output", "fused")
"""Prefixes of the stages of the output: quantized after a gemm, and by gemm_quantized."""


@dataclass(frozen=True, kw_only=True)
class QuantizedGemmCase(GemmCase):
    """gemm_quantized, and beside it gemm and quantize of the output."""

    operation: ClassVar[str] = "gemm-quantized"
    own_families: ClassVar[tuple[Family, ...]] = ()
    seconds: ClassVar[tuple[float, float]] = (12e-3, 185e-9)
    bytes_per_output: ClassVar[int] = 430

    methods: ClassVar[Mapping[str, Method]] = {"gemm_quantized": PRODUCT}

    out_recipe: OutRecipeName
    """Recipe of the output."""

    @classmethod
    def usual_keys(cls, recipe: Recipe, dtype: str) -> dict[str, Any]:
        return super().usual_keys(recipe, dtype) | {"out_recipe": str(recipe)}

    @property
    def flags(self) -> tuple[str, ...]:
        """The layout, the recipe of the output, and the options."""
        out_recipe, layout, *options = super().flags
        return layout, out_recipe, *options

    def problem(self) -> str | None:
        recipe = find_recipe(self.out_recipe)
        if recipe.rounding == "stochastic":
            return f"out_recipe {recipe} rounds stochastically; gemm_quantized takes no random bits"
        if recipe.transform:
            return f"out_recipe {recipe} rotates; gemm_quantized rotates no output"
        return super().problem()

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        return (*super().recipes, find_recipe(self.out_recipe))

    @property
    def axes(self) -> Mapping[str, Axis]:
        found, out = super().axes, find_recipe(self.out_recipe)
        units = {"M": block_rows(out), "N": block_columns(out), "K": 1}
        return {name: Axis(axis.extent, math.lcm(axis.unit, units[name])) for name, axis in found.items()}

    def recipe_of_stage(self, prefix: str) -> Recipe:
        return find_recipe(self.out_recipe) if prefix in MADE else super().recipe_of_stage(prefix)

    @property
    def native_sources(self) -> frozenset[str]:
        fused = {f"gemm_quantized_{NATIVE_NAMES[self.operand_recipes[0].scale]}"}
        return super().native_sources | fused | quantizing_sources(find_recipe(self.out_recipe))

    def stages(self) -> tuple[str, ...]:
        out = find_recipe(self.out_recipe)
        return (*super().stages(), *(stage for made in MADE for stage in quantized_stages(out, f"{made}.")))

    @classmethod
    def stage_names(cls) -> tuple[str, ...]:
        return (*super().stage_names(), *(f"{made}.{stage}" for made in MADE for stage in QUANTIZED))
