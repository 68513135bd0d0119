"""Cases of quantize: a matrix, or both orientations of a matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self, get_args

from narrowgauge.harness.cases.axes import Axis, Tensors, block_columns, block_rows
from narrowgauge.harness.cases.case import Case, rotation_problem, scales_problem, usual_block, view_problem
from narrowgauge.harness.cases.families import CODES, Family, Kind
from narrowgauge.harness.cases.keys import (
    Dtype,
    Flag,
    RandomBits,
    RecipeName,
    Shape,
    Switch,
    Usage,
    View,
    dims,
)
from narrowgauge.harness.cases.methods import Method
from narrowgauge.harness.cases.sections import bands_problem, division_problem
from narrowgauge.spec.formats import E4M3, E8M0, FP32, UE5M3, Format
from narrowgauge.spec.quantized import Half
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.scale_layouts import LAYOUTS, TILES, ScaleLayout

Scales = Annotated[
    Literal[
        "linear", "swizzled", "8x4", "ue8m0-int32", "ue8m0-int32-flashinfer", "ue4m3-int32", "hopper-mxfp4",
        "hopper-mxfp4-4", "cdna4-mxfp4", "blackwell-ragged",
    ],
    Flag.CHANGED,
]  # fmt: skip
"""Layout of block scales."""
SCALE_LAYOUTS: Mapping[str, ScaleLayout] = {**dict(zip(LAYOUTS, get_args(ScaleLayout), strict=True)), "swizzled": TILES}
"""The layout of each word of `Scales`."""
QUANTIZED = ("amax", "tensor scale", "scales", "codes")
"""Stages of a quantized tensor."""


def quantized_stages(recipe: Recipe, prefix: str = "") -> tuple[str, ...]:
    """Stages of a tensor that a recipe quantizes: a recipe without a tensor scale has neither it nor an amax."""
    return tuple(prefix + stage for stage in (QUANTIZED[2:] if recipe.tensor_scale == "none" else QUANTIZED))


NATIVE_NAMES: dict[Format, str] = {E4M3: "nvfp4", UE5M3: "nvfp4", E8M0: "mx", FP32: "fp8"}
"""Name of the native sources of a recipe, by the format of its scales."""
_FUSED_GROUP = 16
"""Rotation group fused into the quantize kernel. Other groups are rotated by a separate launch."""


def quantizing_sources(recipe: Recipe, *, strided: bool = False, both_halves: bool = False) -> frozenset[str]:
    """Native sources for quantizing a tensor, `strided` or not, in one orientation or `both_halves`."""
    sources = frozenset({f"quantize_{NATIVE_NAMES[recipe.scale]}"})
    if recipe.tensor_scale == "none":
        return sources  # no amax
    if recipe.transform is not None:
        if recipe.transform.group == _FUSED_GROUP:
            return sources | {"amax_blocks"}
        return sources | {"hadamard", "amax"} | ({"amax_blocks"} if strided or both_halves else frozenset())
    if recipe.granularity == "row":
        return sources | {"amax_blocks"}
    return sources | ({"amax", "amax_blocks"} if strided else {"amax"})  # a transpose is dense too


@dataclass(frozen=True, kw_only=True)
class MatrixCase(Case):
    """A matrix of a dtype under a recipe."""

    recipe: RecipeName
    dtype: Dtype

    @property
    def _lost(self) -> str | None:
        """Why all elements of the family are zero in this dtype, or None."""
        if self.inputs == "normal-1e-28" and self.dtype == "fp16":
            return "inputs is 'normal-1e-28', which is 0 in fp16; dtype can be fp32 or bf16"
        return None

    @property
    def half(self) -> Half:
        """The quantized half, by the key `usage` if the operation has the key; rowwise if both are."""
        return Half.of(columnwise=getattr(self, "usage", "") == Half.COLUMN)

    @property
    def physical(self) -> bool:
        """Whether the input x is the matrix as it is given, and not the transpose that is quantized.

        Sections are rows of (M, K) in both usages, and a half that is made in place is a half of (M, K).
        """
        return self.half is Half.ROW or bool(self.section_sizes) or self.half.transposed(self.recipes[0])

    @property
    def tensors(self) -> Tensors:
        rows, columns = ("M", "K") if self.physical else ("K", "M")
        parts = "G" if self.section_sizes else "1"
        amaxes = (rows, columns) if self.recipes[0].granularity == "row" else (parts, parts)
        return {
            "x": (rows, columns), "random.x": (rows, f"{columns}/4"), "random.xT": (columns, f"{rows}/4"),
            "scale.x": (parts,), "amax.x": amaxes[:1], "amax.xT": amaxes[1:],
        }  # fmt: skip

    @property
    def axes(self) -> Mapping[str, Axis]:
        along, across = block_columns(self.recipes[0]), block_rows(self.recipes[0])
        units = dict(zip(self.half.pick(("MK", "KM")), (across, along), strict=True))
        sections = {"G": Axis(len(self.section_sizes))} if self.section_sizes else {}
        rows = max(self.section_sizes, default=self.extents["M"])
        extents = {"M": rows, "K": self.extents["K"]}
        return sections | {name: Axis(extents[name], units[name]) for name in self.tensors["x"]}

    @property
    def constrained(self) -> Mapping[str, tuple[int, ...]]:
        rows, columns = self.extents["M"], self.extents["K"]
        return self.half.pick(({"M": (rows,), "K": (columns,)}, {"M": (columns,), "K": (rows,)}))

    def axes_of_stage(self, prefix: str) -> tuple[str, ...]:
        half = self.half if self.section_sizes else Half.of(columnwise=prefix == Half.COLUMN)
        x = self.tensors["x"]
        return x if half.transposed(self.recipes[0]) else half.pick((x, x[::-1]))


@dataclass(frozen=True, kw_only=True)
class QuantizeCase(MatrixCase):
    """quantize, and dequantize of the result; quantize_both for usage `both`."""

    operation: ClassVar[str] = "quantize"
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.QUANTIZED,)
    own_families: ClassVar[tuple[Family, ...]] = (CODES,)
    methods: ClassVar[Mapping[str, Method]] = {
        "quantize": Method(converted=True), "quantize_both": Method(optional=("random",)), "dequantize": Method(),
    }  # fmt: skip
    declarations: ClassVar[Mapping[str, tuple[str, ...]]] = {"random": ("own",)}
    seconds: ClassVar[tuple[float, float]] = (7e-3, 210e-9)

    shape: Annotated[Shape, dims("[M, K] or (…, K)", 2, 4)]
    """(M, K), or three or four sizes (…, K), quantized as a matrix (M, K)."""
    usage: Usage = "rowwise"
    """`columnwise` quantizes the physical transpose."""
    view: View = "contiguous"
    scales: Scales = "linear"
    random: RandomBits = None
    """Random bits of a recipe with stochastic rounding: seed and offset by default, words, or seed and offset at the
    edges of 32 and 64 bits."""
    amax: Switch = False
    """Whether the amax is given, the amax of a tensor with x as a shard."""
    bands: Switch = False
    """Whether x is NaN but for the rows of `band_rows`, and only these are judged: for more than 2^31 elements."""

    @property
    def called(self) -> str:
        return "quantize_both" if self.halves else super().called

    @property
    def halves(self) -> tuple[Half, ...]:
        """Halves that `quantize_both` is asked for; empty for `quantize`, which cannot make a half stored in place."""
        if self.usage == "both":
            return tuple(Half)
        return (self.half,) if self.half.transposed(self.recipes[0]) else ()

    @classmethod
    def usual_shapes(cls, recipe: Recipe) -> list[tuple[int, ...]]:
        width = usual_block(recipe)[1]
        # 252, 248, 480: behind the last whole 16, 32, 64 and 128 columns lie different columns.
        more = [(5, max(256, 4 * width) - width // 4), (3, width + 1), (2, 3, 2 * width), (0, 2 * width)]
        return [*super().usual_shapes(recipe), *more]

    def problem(self) -> str | None:
        recipe = find_recipe(self.recipe)
        if self.random is not None and recipe.rounding != "stochastic":
            return f"random is {self.random!r}, but recipe {recipe} does not round stochastically; leave it out"
        if recipe.zero_points:
            return f"recipe {recipe} has zero points, which no stage judges; products take such weights as they are"
        rows, columns = math.prod(self.shape[:-1]), self.shape[-1]
        halves = tuple(Half) if self.usage == "both" else (self.half,)
        for shape in (half.shape((rows, columns)) for half in halves):
            if wrong := scales_problem(self.scales, SCALE_LAYOUTS[self.scales], recipe, shape):
                return wrong
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

    @classmethod
    def of_matrix(cls, recipe: Recipe, shape: tuple[int, int], dtype: Dtype, inputs: str, file: str) -> Iterable[Self]:
        """Rowwise and columnwise cases of a captured matrix."""
        for half in Half:
            yield cls(recipe=str(recipe), shape=shape, dtype=dtype, inputs=inputs, usage=half.value, file=file)

    @property
    def axes(self) -> Mapping[str, Axis]:
        found = super().axes
        if self.usage != "both":
            return found
        unit = math.lcm(*(axis.unit for axis in found.values()))  # quantized along M too
        return {name: Axis(axis.extent, unit) for name, axis in found.items()}

    @property
    def constrained(self) -> Mapping[str, tuple[int, ...]]:
        sizes = tuple(self.extents.values())
        return {"M": sizes, "K": sizes} if self.usage == "both" else super().constrained

    @property
    def work(self) -> int:
        return super().work * (2 if self.usage == "both" else 1)

    @property
    def memory(self) -> int:
        # Resident set on a CPU, 2^22 elements: 21 an element, both halves 105. On an H200: 38, columnwise 51, both 69.
        element = 24 if self.bands else {"rowwise": 42, "columnwise": 57, "both": 110}[self.usage]
        return element * math.prod(self.shape)

    @property
    def native_sources(self) -> frozenset[str]:
        both = self.usage == "both"
        sources = quantizing_sources(self.recipes[0], strided=self.view != "contiguous", both_halves=both)
        return sources if both else sources | {"dequantize"}

    def stages(self) -> tuple[str, ...]:
        shown = quantized_stages(self.recipes[0])
        if self.usage != "both":
            return (*shown, "values")
        return (*(f"{half}.{stage}" for half in Half for stage in shown), "halves")

    @classmethod
    def stage_names(cls) -> tuple[str, ...]:
        halves = (f"{half}.{stage}" for half in Half for stage in QUANTIZED)
        return (*QUANTIZED, "values", *halves, "halves", "layout", *(f"{half}.layout" for half in Half))


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
