"""Cases of quantize and quantize-grouped, and of the steps that also run alone: transform, swizzle, update-scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from narrowgauge.harness.cases.case import Case, rotation_problem, view_problem
from narrowgauge.harness.cases.keys import (
    DelayedRecipeName,
    Dtype,
    Orientation,
    RandomBits,
    RecipeName,
    RotatingRecipeName,
    Scales,
    SectionsText,
    Shape,
    Switch,
    Usage,
    View,
    dims,
)
from narrowgauge.harness.cases.sections import bands_problem, division_problem, section_sizes
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.recipes import Recipe, find_recipe


@dataclass(frozen=True, kw_only=True)
class _MatrixCase(Case):
    """A matrix of a dtype under a recipe."""

    recipe: RecipeName
    dtype: Dtype

    @property
    def recipe_names(self) -> tuple[str, ...]:
        return (self.recipe,)

    @property
    def dtype_label(self) -> str:
        return self.dtype

    @property
    def _lost(self) -> str | None:
        """Why all elements of the family are zero in this dtype, or None."""
        if self.inputs == "normal-1e-28" and self.dtype == "fp16":
            return "inputs is 'normal-1e-28', which is 0 in fp16; dtype can be fp32 or bf16"
        return None


@dataclass(frozen=True, kw_only=True)
class QuantizeCase(_MatrixCase):
    """quantize, and dequantize of the result; quantize_both for usage `both`."""

    operation: ClassVar[str] = "quantize"

    shape: Annotated[Shape, dims("[M, K] or (…, K)", 2, 4)]
    """(M, K), or three or four sizes (…, K), quantized as a matrix (M, K)."""
    usage: Usage = "rowwise"
    """`columnwise` quantizes the physical transpose."""
    view: View = "contiguous"
    scales: Scales = "linear"
    random: RandomBits = None
    """Form of the random bits of a recipe with stochastic rounding: seed and offset by default, or words."""
    amax: Switch = False
    """Whether the amax is given, as that of a tensor of which x is a shard."""
    bands: Switch = False
    """Whether x is NaN but for the rows of `band_rows`, and only these are judged: for more than 2^31 elements."""

    def problem(self) -> str | None:
        recipe = find_recipe(self.recipe)
        if self.random is not None and recipe.rounding != "stochastic":
            return f"random is {self.random!r}, but recipe {recipe} does not round stochastically; leave it out"
        if self.scales == "swizzled" and recipe.scale is FP32:
            return f"scales is 'swizzled', but recipe {recipe} has float32 scales; the 128×4 layout is of bytes"
        rows, columns = math.prod(self.shape[:-1]), self.shape[-1]
        # The columnwise half runs along M: `columnwise` is quantize of the physical transpose.
        extent, axis = (columns, "K") if self.usage == "rowwise" else (rows, "M")
        wrong = self._lost or view_problem(self.view, self.dtype) or (amax_problem(recipe) if self.amax else None)
        if self.bands:
            wrong = wrong or bands_problem(rows * columns) or self._not_in_bands(recipe)
        return wrong or rotation_problem(recipe, [self.dtype], extent, axis)

    def _not_in_bands(self, recipe: Recipe) -> str | None:
        """Why the bands of x are not quantized as x is, or None."""
        plain = (self.usage, self.view, self.scales, self.amax) == ("rowwise", "contiguous", "linear", False)
        if len(self.shape) != 2 or not plain:
            return "bands is true, which takes [M, K], usage rowwise, a contiguous view, linear scales and no amax"
        spreads = recipe.nan != "ignore" and recipe.tensor_scale != "none"
        if spreads or recipe.granularity == "row" or recipe.rounding == "stochastic" or recipe.tensor_scale == "given":
            return (
                f"bands is true, but the rows of {recipe} depend on others: it takes a recipe without stochastic "
                "rounding, row scales and a given scale, whose amax leaves NaN out"
            )
        return None


@dataclass(frozen=True, kw_only=True)
class GroupedQuantizeCase(_MatrixCase):
    """quantize_grouped: every section of rows has its own amax."""

    operation: ClassVar[str] = "quantize-grouped"

    shape: Annotated[Shape, dims("[M, K]", 2, 2)]
    sections: SectionsText
    """Kind and count of the sections, such as `even:4` (`harness.cases.sections`)."""
    usage: Orientation = "rowwise"
    """`columnwise` quantizes the physical transpose of every section."""
    view: View = "contiguous"
    amax: Switch = False
    """Whether the amax of every section is given."""

    @property
    def section_sizes(self) -> tuple[int, ...]:
        return section_sizes(self.sections, self.shape[0], whole=self._whole)

    @property
    def _whole(self) -> int:
        """Divisor of the rows of a section: a columnwise half is rotated in groups of rows."""
        recipe = find_recipe(self.recipe)
        return recipe.transform.group if recipe.transform and self.usage == "columnwise" else 1

    def problem(self) -> str | None:
        recipe, (rows, columns) = find_recipe(self.recipe), self.shape
        extent, axis = (columns, "K") if self.usage == "rowwise" else (rows, "M")
        wrong = self._lost or view_problem(self.view, self.dtype) or (amax_problem(recipe) if self.amax else None)
        wrong = wrong or rotation_problem(recipe, [self.dtype], extent, axis)
        return wrong or sections_problem(recipe, self.sections, rows, whole=self._whole)


@dataclass(frozen=True, kw_only=True)
class TransformCase(_MatrixCase):
    """The rotation alone."""

    operation: ClassVar[str] = "transform"

    recipe: RotatingRecipeName
    shape: Annotated[Shape, dims("[M, K]", 2, 2)]
    view: View = "contiguous"

    def problem(self) -> str | None:
        wrong = view_problem(self.view, self.dtype)
        return wrong or rotation_problem(find_recipe(self.recipe), [self.dtype], self.shape[-1], "K")


@dataclass(frozen=True, kw_only=True)
class SwizzleCase(Case):
    """swizzle of bytes, and unswizzle of the result."""

    operation: ClassVar[str] = "swizzle"

    shape: Annotated[Shape, dims("[R, C]", 2, 2)]
    """Rows and columns of the bytes."""


@dataclass(frozen=True, kw_only=True)
class UpdateScaleCase(Case):
    """update_scale of delayed scaling."""

    operation: ClassVar[str] = "update-scale"

    recipe: DelayedRecipeName
    shape: Annotated[Shape, dims("[H, N]", 2, 2)]
    """Histories of H amaxes for N tensors."""

    @property
    def recipe_names(self) -> tuple[str, ...]:
        return (self.recipe,)

    def problem(self) -> str | None:
        return None if self.shape[0] else "shape is [0, N]; a history [H, N] has at least one amax of each tensor"


def amax_problem(recipe: Recipe) -> str | None:
    """Why a recipe takes no given amax, or None."""
    if recipe.tensor_scale == "none":
        return f"amax is true, but recipe {recipe} has no tensor scale and takes no amax; leave it out"
    if recipe.tensor_scale == "given":
        return f"amax is true, but recipe {recipe} is given its scale; leave it out"
    return None


def sections_problem(recipe: Recipe, sections: str, rows: int, *, whole: int = 1) -> str | None:
    """Why the rows of a matrix cannot be divided into sections of multiples of `whole`, or None."""
    if recipe.granularity == "row":
        return f"recipe {recipe} has an amax for every row; sections of one amax each do not apply"
    return division_problem(sections, rows, whole=whole)
