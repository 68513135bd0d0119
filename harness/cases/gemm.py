"""Cases of products: gemm, gemm-grouped and gemm-quantized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar

from narrowgauge.harness.cases.case import Case, rotation_problem, view_problem
from narrowgauge.harness.cases.keys import (
    Dtype,
    Layout,
    OtherRecipeName,
    OutRecipeName,
    RecipeName,
    Scales,
    SectionsText,
    Shape,
    Switch,
    View,
    dims,
)
from narrowgauge.harness.cases.quantize import sections_problem
from narrowgauge.harness.cases.sections import bands_problem, section_sizes
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.recipe import mismatch
from narrowgauge.spec.recipes import Recipe, find_recipe


@dataclass(frozen=True, kw_only=True)
class ProductCase(Case):
    """A product of x (M, K) with w (N, K), or with a matrix w per section in a grouped product."""

    shape: Annotated[Shape, dims("[M, K, N]", 3, 3)]
    recipe: RecipeName
    """Recipe of x."""
    w_recipe: OtherRecipeName = None
    """Recipe of w; by default the recipe of x."""
    x: Dtype
    w: Dtype
    out: Dtype
    """Dtypes of the two operands and of the output."""
    accumulate: Switch = False
    """Whether the product is added to a matrix c (M, N)."""
    bias: Switch = False

    @property
    def recipe_names(self) -> tuple[str, ...]:
        return self.recipe, self.w_recipe or self.recipe

    @property
    def operand_recipes(self) -> tuple[Recipe, Recipe]:
        """Recipes of x and w."""
        return find_recipe(self.recipe), find_recipe(self.w_recipe or self.recipe)

    @property
    def dtype_label(self) -> str:
        return f"{self.x}x{self.w}-{self.out}"


@dataclass(frozen=True, kw_only=True)
class GemmCase(ProductCase):
    """quantize of both operands, and gemm."""

    operation: ClassVar[str] = "gemm"

    layout: Layout = "tn"
    """`nn` stores w, and `nt` both operands, with K as the rows: their columnwise halves are multiplied."""
    view: View = "contiguous"
    """Memory of x, w, c and bias: `contiguous`, `pitched` or an offset. A bias has no rows, so no pitch."""
    scales: Scales = "linear"
    """Layout of the block scales of both operands."""
    same: Switch = False
    """Whether x is multiplied by itself: both operands of the product are one Quantized."""
    bands: Switch = False
    """Whether the rows of `band_rows` of the output alone are judged: for more than 2^31 outputs."""

    def problem(self) -> str | None:
        if self.view in ("strided", "transposed"):
            return f"view is {self.view!r}; tensors of a {self.operation} are contiguous, pitched or offset"
        if wrong := view_problem(self.view, self.x, self.w, self.out):
            return wrong
        left, right = self.operand_recipes
        if self.scales == "swizzled":
            if left.scale is FP32:
                return f"scales is 'swizzled', but recipe {left} has float32 scales; the 128×4 layout is of bytes"
            if self.layout != "tn" and "in-place" in (left.columnwise, right.columnwise):
                return f"scales is 'swizzled' with layout {self.layout!r}; halves made in place take layout tn"
        if self.same and (left != right or self.x != self.w or self.shape[0] != self.shape[2] or self.layout != "tn"):
            return "same is true, which multiplies x by itself: leave w_recipe out, give w as x, N as M, and layout tn"
        if self.bands and (wrong := bands_problem(self.shape[0] * self.shape[2]) or self._not_in_bands(left)):
            return wrong
        for recipe in (left, right):
            if recipe.transform and self.layout != "nt":
                return (
                    f"layout is {self.layout!r}, but recipe {recipe} rotates columnwise operands, and rotations cancel "
                    "where both operands are: layout can be nt"
                )
            if wrong := rotation_problem(recipe, [self.x, self.w], self.shape[1], "K"):
                return wrong
        return _mismatch(*self.recipe_names)

    def _not_in_bands(self, recipe: Recipe) -> str | None:
        """Why the bands of the output are not judged by the same rows of x, or None."""
        if self.operation != "gemm" or self.layout != "tn" or self.accumulate or self.scales != "linear":
            return "bands is true, which takes a gemm of layout tn with linear scales and without accumulate"
        if recipe.granularity == "row" or recipe.stored_rows != 1:
            return f"bands is true, but recipe {recipe} has scales for several rows, or an amax for each"
        return None


@dataclass(frozen=True, kw_only=True)
class GroupedGemmCase(ProductCase):
    """quantize_grouped of x, quantize of w for every section, and gemm_grouped."""

    operation: ClassVar[str] = "gemm-grouped"

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
        return _mismatch(*self.recipe_names) or sections_problem(find_recipe(self.recipe), self.sections, self.shape[0])


@dataclass(frozen=True, kw_only=True)
class QuantizedGemmCase(GemmCase):
    """gemm_quantized, and beside it gemm and quantize of the output."""

    operation: ClassVar[str] = "gemm-quantized"

    out_recipe: OutRecipeName
    """Recipe of the output."""

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


@cache
def _mismatch(x: str, w: str) -> str | None:
    """Why recipes of these names cannot be multiplied, or None."""
    left, right = find_recipe(x), find_recipe(w)
    reason = mismatch(left, right)
    return f"recipe {left} and w_recipe {right} cannot be multiplied: {reason}" if reason else None
