"""Cases of gemm, and what the cases of all products have in common."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Self

from narrowgauge.harness.cases.axes import Axis, Tensors, block_columns, block_rows
from narrowgauge.harness.cases.case import Case, rotation_problem, scales_problem, uneven, usual_block, view_problem
from narrowgauge.harness.cases.families import CODES, Family, Kind
from narrowgauge.harness.cases.keys import Dtype, Layout, OtherRecipeName, RecipeName, Shape, Switch, View, dims
from narrowgauge.harness.cases.methods import Method
from narrowgauge.harness.cases.sections import bands_problem
from narrowgauge.harness.operations.quantize.case import (
    NATIVE_NAMES,
    QUANTIZED,
    SCALE_LAYOUTS,
    Scales,
    quantized_stages,
    quantizing_sources,
)
from narrowgauge.spec.recipe import mismatch
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.summation import OPERANDS, ORDERS, Summation, is_order

TRUNCATING = "truncating"
"""An accumulator. As a result of `gemm_order`: any order, with a truncating accumulator."""
PROBE, PROBE_13 = PROBES = "probe", "probe-13"
"""Declarations of "gemm": the order is found by a probe (docs/accumulators.md#declare-the-probe)."""
PRODUCT = Method(optional=("out_dtype",))
"""A method with two operands."""
CAPTURED_ROWS = 128
"""M of the cases of a captured weight."""
CAPTURED_OUTPUTS: tuple[Dtype, ...] = ("bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class ProductCase(Case):
    """A product of x (M, K) with w (N, K), or with a matrix w per section in a grouped product."""

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.MULTIPLIED,)

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

    @classmethod
    def usual_shapes(cls, recipe: Recipe) -> list[tuple[int, ...]]:
        width = usual_block(recipe)[1]
        main, tails = (64, max(256, 2 * width), 48), [(145, uneven(width), 17), (24, 2 * width + width // 2, 200)]
        return [main, (1, width, 16), *tails]

    @classmethod
    def usual_keys(cls, recipe: Recipe, dtype: str) -> dict[str, Any]:
        layout = {"layout": "nt" if recipe.transform else "tn"} if "layout" in cls.__dataclass_fields__ else {}
        return {"x": "bf16", "w": "bf16", "out": dtype, **layout}

    @classmethod
    def usual_options(cls, parameters: Collection[str]) -> list[tuple[dict[str, Any], bool]]:
        switches = [{"c": "accumulate", "bias": "bias"}[addend] for addend in ("c", "bias") if addend in parameters]
        sets = [[switch] for switch in switches] + ([switches] if len(switches) == 2 else [])
        dtypes: list[tuple[dict[str, Any], bool]] = [({"out": "fp16"}, True)] if "out_dtype" in parameters else []
        return [*((dict.fromkeys(names, True), False) for names in sets), *dtypes]

    @classmethod
    def may_refuse(cls, shape: Sequence[int], recipe: Recipe) -> bool:
        width = 1 if recipe.spans_k else recipe.block[1]
        return any(size % 16 for size in shape) or bool(shape[1] % width)

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

    @property
    def tensors(self) -> Tensors:
        parts = "G" if self.section_sizes else "1"
        bias = ("G", "N") if self.section_sizes else ("N",)
        return {
            "x": ("M", "K"), "w": ("G*N" if self.section_sizes else "N", "K"), "c": ("M", "N"), "bias": bias,
            "scale.x": (parts,), "scale.w": (parts,), "scale.output": ("1",),
        }  # fmt: skip

    @property
    def axes(self) -> Mapping[str, Axis]:
        sections = {"G": Axis(len(self.section_sizes))} if self.section_sizes else {}
        x, w = self.operand_recipes
        rows = max(self.section_sizes, default=self.shape[0])
        return sections | {
            "M": Axis(rows, block_rows(x)), "N": Axis(self.shape[2], block_rows(w)),
            "K": Axis(self.shape[1], math.lcm(block_columns(x), block_columns(w))),
        }  # fmt: skip

    def axes_of_stage(self, prefix: str) -> tuple[str, ...]:
        return {"x": ("M", "K"), "w": ("N", "K")}.get(prefix, ("M", "N"))

    def recipe_of_stage(self, prefix: str) -> Recipe:
        return self.operand_recipes[prefix == "w"]

    @property
    def elements(self) -> int:
        rows, depth, columns = self.shape
        return rows * depth + max(1, len(self.section_sizes)) * columns * depth

    @property
    def work(self) -> int:
        return super().work + math.prod(self.shape) // 32

    bytes_per_output: ClassVar[int] = 360
    """Peak memory in bytes per output, beside 66 per element of the operands."""

    @property
    def memory(self) -> int:
        # Resident set on a CPU: 58 an element, 163 an output. On an H200: 149 an output, in the order of tensor cores
        # 214 and, for 1024³, 330.
        rows, _, columns = self.shape
        return 66 * self.elements + self.bytes_per_output * rows * columns

    @property
    def native_sources(self) -> frozenset[str]:
        x, w = self.operand_recipes
        strided = bool(self.section_sizes) or getattr(self, "view", "contiguous") != "contiguous"
        operands = quantizing_sources(x, strided=strided) | quantizing_sources(x) | quantizing_sources(w)
        return operands | {f"gemm_{NATIVE_NAMES[x.scale]}"}

    def stages(self) -> tuple[str, ...]:
        x, w = self.operand_recipes
        return (*quantized_stages(x, "x."), *quantized_stages(w, "w."), "output")

    @classmethod
    def stage_names(cls) -> tuple[str, ...]:
        return (*(f"{operand}.{stage}" for operand in "xw" for stage in QUANTIZED), "output")


@dataclass(frozen=True, kw_only=True)
class GemmCase(ProductCase):
    """quantize of both operands, and gemm."""

    operation: ClassVar[str] = "gemm"
    methods: ClassVar[Mapping[str, Method]] = {"gemm": PRODUCT}
    own_families: ClassVar[tuple[Family, ...]] = (CODES,)
    descriptions: ClassVar[tuple[str, ...]] = ("gemm_order",)
    declarations: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "gemm": (*ORDERS, *PROBES), "accumulator": (TRUNCATING,), "subnormals": ("flushed",), "operands": OPERANDS,
        "batch": ("invariant",),
    }  # fmt: skip
    seconds: ClassVar[tuple[float, float]] = (11e-3, 40e-9)

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
        if self.scales != "linear":
            (m, k, n), layout = self.shape, SCALE_LAYOUTS[self.scales]
            for recipe, shape in ((left, (m, k)), (right, (n, k))):
                if wrong := scales_problem(self.scales, layout, recipe, shape):
                    return wrong
            if self.layout != "tn" and "in-place" in (left.columnwise, right.columnwise):
                return f"scales is {self.scales!r} with layout {self.layout!r}; halves made in place take layout tn"
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
        return product_problem(*self.recipe_names)

    def _not_in_bands(self, recipe: Recipe) -> str | None:
        """Why the bands of the output are not judged by the same rows of x, or None."""
        if type(self) is not GemmCase or self.layout != "tn" or self.accumulate or self.scales != "linear":
            return "bands is true, which takes a gemm of layout tn with linear scales and without accumulate"
        if recipe.granularity == "row" or recipe.stored_rows != 1:
            return f"bands is true, but recipe {recipe} has scales for several rows, or an amax for each"
        return None

    @classmethod
    def may_declare(cls, key: str, value: object) -> bool:
        return super().may_declare(key, value) or (key == "gemm" and is_order(value))

    @classmethod
    def declaration_problem(cls, declared: Mapping[str, Any]) -> str | None:
        order = declared.get("gemm")
        try:
            Summation(
                None if order in PROBES else order, truncates="accumulator" in declared,
                operands=declared.get("operands"),
            )  # fmt: skip
        except ValueError as error:
            return f"declares 'gemm' to be {order!r}: {error}"
        return None

    @classmethod
    def of_matrix(cls, recipe: Recipe, shape: tuple[int, int], dtype: Dtype, inputs: str, file: str) -> Iterable[Self]:
        """Cases whose w (N, K) is a captured matrix: x is normal (128, K) of the same dtype, the output bf16 and fp32.
        The recipe decides the layout."""
        if cls is not GemmCase:
            return
        layout: Layout = "nt" if recipe.transform else "tn"
        rows, columns = shape
        for out in CAPTURED_OUTPUTS:
            yield cls(
                recipe=str(recipe), shape=(CAPTURED_ROWS, columns, rows), x=dtype, w=dtype, out=out, inputs=inputs,
                layout=layout, file=file,
            )  # fmt: skip

    @property
    def memory(self) -> int:
        if not self.bands:
            return super().memory
        rows, depth, columns = self.shape
        return 66 * depth * (rows + columns) + 24 * rows * columns

    @property
    def native_sources(self) -> frozenset[str]:
        return super().native_sources | ({"swizzle"} if self.scales == "swizzled" else frozenset())

    def stages(self) -> tuple[str, ...]:
        return tuple(stage for stage in super().stages() if not (self.same and stage.startswith("w.")))


@cache
def product_problem(x: str, w: str) -> str | None:
    """Why recipes of these names cannot be multiplied, or None."""
    left, right = find_recipe(x), find_recipe(w)
    reason = mismatch(left, right)
    return f"recipe {left} and w_recipe {right} cannot be multiplied: {reason}" if reason else None
