"""Argument checks: the reference and the native kernels raise the same error for the same mistake.

Each row of a table is a mistake. Its error names the argument, its value or shape, and the remedy or the expected
value. The native kernels run on the CPU.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.spec import arguments
from narrowgauge.spec.arguments import dtype_name
from narrowgauge.spec.modules import arguments as module_arguments
from narrowgauge.spec.modules.autocast import autocast
from narrowgauge.spec.recipes import find_recipe

Call = Callable[[Any], object]
"""A call of the ops module of a side."""


class Row(NamedTuple):
    """A mistake: the call, its exception, and parts of the message."""

    name: str
    call: Call
    error: type[Exception]
    fragments: tuple[str, ...]


def row(name: str, call: Call, error: type[Exception], *fragments: str) -> Row:
    return Row(name, call, error, fragments)


def calling(method: str, *given: Any, **options: Any) -> Call:
    """A call of `method` with these arguments."""
    return lambda ops: getattr(ops, method)(*given, **options)


X = torch.ones(3, 32)
BF16 = X.bfloat16()
ONE = torch.ones(1)
FP32 = torch.float32
MX, BLOCK, CURRENT, DELAYED = "mxfp8-e4m3", "fp8-block-1x128-e4m3-pow2", "fp8-current-e4m3", "fp8-delayed-e4m3"
FAMILIES = ("nvfp4", MX, BLOCK, CURRENT)
"""A recipe of each family of kernels: NVFP4, MX, and FP8 without and with an amax of the tensor."""


# Quantizing.

METHODS: dict[str, tuple[torch.Tensor, ...]] = {
    "quantize": (),
    "quantize_both": (),
    "quantize_grouped": (torch.tensor([3]),),
}
"""The methods that quantize, and their arguments between x and the recipe: sizes of sections, here a single section."""


def every_method(
    name: str, x: torch.Tensor, recipes: Sequence[str], error: type[Exception], *fragments: str, **options: Any
) -> Iterator[Row]:
    """A mistake in every method that quantizes, for every recipe. RECIPE in a fragment is the name of the recipe."""
    for used, (method, sizes) in product(recipes, METHODS.items()):
        given = options
        if method == "quantize_both" and "amax" in options:
            given = options | {"amax": (options["amax"],) * 2}
        call = calling(method, x, *sizes, used, **given)
        yield row(f"{method} {used} {name}", call, error, *(part.replace("RECIPE", used) for part in fragments))


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


STOCHASTIC = ("nvfp4-sr", "mxfp4-sr")

QUANTIZING: list[Row] = [
    # as_matrix
    *every_method("x of float64", X.double(), FAMILIES, TypeError, "x is float32, bfloat16, float16", "not float64"),
    *every_method("of a vector", X[0], FAMILIES, ValueError, "(M, K)", "not shape (32,)", "reshape it"),
    # wanted_halves
    *(row(f"neither half of {name}", calling("quantize_both", X, name, rowwise=False, columnwise=False), ValueError,
          "quantize_both", "rowwise=True", "columnwise=True", "both are False") for name in FAMILIES),
    # check_rotation
    *(row(f"transform of {name}", calling("transform", BF16, name), ValueError, f"recipe {name} has no transform",
          "nvfp4-rht") for name in ("nvfp4", "nvfp4-2d")),
    *(row(f"transform of shape {shape}", calling("transform", torch.ones(shape).bfloat16(), "nvfp4-rht"), ValueError,
          "recipe nvfp4-rht", "(M, K)", f"not shape {shape}", "reshape it") for shape in ((), (16,), (2, 3, 16))),
    *(row(f"transform of {dtype_name(dtype)}", calling("transform", X.to(dtype), "nvfp4-rht"), TypeError,
          "recipe nvfp4-rht rotates bfloat16", f"not {dtype_name(dtype)}", "convert it")
      for dtype in (FP32, torch.float16, torch.float64)),
    *(row(f"transform of {columns} columns by {name}", calling("transform", torch.ones(2, columns).bfloat16(), name),
          ValueError, f"recipe {name}", f"groups of {group}", f"{columns} elements of x (2, {columns})", "pad x")
      for name, group, columns in (("nvfp4-rht", 16, 24), ("nvfp4-rht128", 128, 64), ("nvfp4-rht2", 2, 3))),
    # check_rotated
    *every_method("x of float32", X, ("nvfp4-rht", "nvfp4-rht32"), TypeError, "recipe RECIPE rotates bfloat16",
                  "not float32", "convert it"),
    *(row(f"quantize_both {name} of half a group of rows", calling("quantize_both", BF16.repeat(8, 1), name),
          ValueError, f"recipe {name}", f"groups of {group}", "24 elements of x", "pad x")
      for name, group in (("nvfp4-rht", 16), ("nvfp4-rht32", 32))),
    # check_random
    *every_method("random bits", X, FAMILIES, ValueError, "recipe RECIPE rounds nearest-even", "no random bits",
                  random=(1, 2)),
    *(row(f"words of {name}", calling("quantize", X, name, random=words(3, 8)), ValueError,
          f"recipe {name} rounds nearest-even", "no random bits") for name in ("nvfp4-2d", "nvfp4-rowscaled", MX)),
    *(row(f"words of nvfp4 with {half}=False",
          calling("quantize_both", X, "nvfp4", random=(words(3, 8), words(32, 1)), **{half: False}), ValueError,
          "recipe nvfp4 rounds nearest-even", "no random bits") for half in ("rowwise", "columnwise")),
    *(row(f"no random bits of {name}", calling("quantize", X, name), ValueError, f"recipe {name} rounds stochastically",
          "random=(seed, offset)", "int32 (3, 8)") for name in STOCHASTIC),
    *(row(f"no random bits of {name} with {half}=False", calling("quantize_both", X, name, **{half: False}), ValueError,
          f"recipe {name} rounds stochastically", "random=(seed, offset)", f"int32 {shape}")
      for name in STOCHASTIC for half, shape in (("columnwise", "(3, 8)"), ("rowwise", "(32, 1)"))),
    *(row(f"words of {dtype_name(dtype)}", calling("quantize", X, "nvfp4-sr", random=words(3, 8).to(dtype)), TypeError,
          "random is int32", f"not {dtype_name(dtype)}") for dtype in (torch.int64, torch.uint8, FP32)),
    *(row(f"words of shape {shape}", calling("quantize", X, "nvfp4-sr", random=words(*shape)), ValueError,
          "random has shape (3, 8)", f"not {shape}") for shape in ((3, 7), (3, 9), (8, 3), (24,))),
    *(row(f"words of the rowwise half for the columnwise one of {name}",
          calling("quantize_both", X, name, rowwise=False, random=(None, words(3, 8))), ValueError,
          "random has shape (32, 1)", "not (3, 8)") for name in STOCHASTIC),
    *(row(f"words of the columnwise half for both of {name}",
          calling("quantize_both", X, name, random=(words(32, 1), words(32, 1))), ValueError,
          "random has shape (3, 8)", "not (32, 1)") for name in STOCHASTIC),
    *(row(f"random={random!r}", calling("quantize", X, "nvfp4-sr", random=random), TypeError, "random", "words",
          "(seed, offset)", f"not {random!r}")
      for random in (7, (7,), (7, 8, 9), [7, 8], (7, 8.0), (True, 1), "seed")),
    # split_random
    *(row(f"{what} for both halves of {name}", calling("quantize_both", X, name, random=random), TypeError,
          "random of two halves", "(seed, offset)", "words of the rowwise", f"not {type(random).__name__}")
      for name in STOCHASTIC for what, random in (
          ("one tensor of words", words(3, 8)), ("three numbers", (1, 2, 3)), ("a number and words", (1, words(32, 1))),
          ("True", (True, 1)), ("one number", 7), ("a list", [1, 2]))),
    # check_scale
    *every_method("no scale", X, (DELAYED,), ValueError, "recipe RECIPE takes scale", "float32 (1,)"),
    *every_method("a scale", X, FAMILIES, ValueError, "recipe RECIPE computes its own scales", "omit scale", scale=ONE),
    *every_method("a scale of float16", X, (DELAYED,), TypeError, "scale is float32", "not float16", scale=ONE.half()),
    *(each for shape in ((), (2,), (1, 1)) for each in every_method(
        f"a scale of shape {shape}", X, (DELAYED,), ValueError, "scale has shape (1,)", f"not {shape}",
        scale=torch.ones(shape))),
    # check_amax
    *every_method("an amax", X, (MX, "mxfp4-2d", BLOCK), ValueError, "recipe RECIPE has no tensor scale",
                  "takes no amax", amax=ONE),
    *(row(f"a columnwise amax of {name}", calling("quantize_both", X, name, amax=(None, ONE)), ValueError,
          f"recipe {name} has no tensor scale", "takes no amax") for name in (MX, BLOCK)),
    *(each for dtype in (torch.float64, torch.bfloat16) for each in every_method(
        f"an amax of {dtype_name(dtype)}", X, ("nvfp4", CURRENT), TypeError, "amax is float32",
        f"not {dtype_name(dtype)}", amax=ONE.to(dtype))),
    *(each for shape in ((), (2,), (1, 1)) for each in every_method(
        f"an amax of shape {shape}", X, ("nvfp4", CURRENT), ValueError, "amax has shape (1,)", f"not {shape}",
        amax=torch.ones(shape))),
    *(row(f"a columnwise amax of float64 of {name}", calling("quantize_both", X, name, amax=(ONE, ONE.double())),
          TypeError, "columnwise amax is float32", "not float64") for name in ("nvfp4", CURRENT)),
    *(row(f"an amax of shape {shape} of three rows",
          calling("quantize", X, "nvfp4-rowscaled", amax=torch.ones(shape)), ValueError, "amax has shape (3,)",
          f"not {shape}") for shape in ((1,), (2,), (3, 1))),
    row("an amax of float64 of three rows", calling("quantize", X, "nvfp4-rowscaled", amax=torch.ones(3).double()),
        TypeError, "amax is float32", "not float64"),
    row("a columnwise amax of three rows", calling("quantize_both", X, "nvfp4-rowscaled", amax=(torch.ones(3),) * 2),
        ValueError, "columnwise amax has shape (32,)", "not (3,)"),
    # chosen_layout
    *(row(f"{method} {name} swizzled", calling(method, X, name, swizzled=True, scale=ONE if name == DELAYED else None),
          ValueError, f"recipe {name} has float32 scales", "128×4", "bytes")
      for method in ("quantize", "quantize_both") for name in (BLOCK, CURRENT, DELAYED)),
    # check_scales_matrix
    *(row(f"scales of {dtype_name(dtype)}", calling("swizzle", torch.ones(4, 4).to(dtype)), TypeError,
          "scales is uint8", f"not {dtype_name(dtype)}") for dtype in (FP32, torch.int8)),
    *(row(f"scales of shape {shape}", calling("swizzle", torch.ones(shape, dtype=torch.uint8)), ValueError,
          "scales are a matrix", f"not shape {shape}") for shape in ((), (512,), (1, 128, 4))),
    *(row(f"swizzled scales of {dtype_name(dtype)}", calling("unswizzle", torch.ones(128, 4).to(dtype), (128, 4)),
          TypeError, "scales is uint8", f"not {dtype_name(dtype)}") for dtype in (FP32, torch.int8)),
    *(row(f"swizzled scales of shape {shape} for {wanted}",
          calling("unswizzle", torch.ones(shape, dtype=torch.uint8), wanted), ValueError, "scales", f"{padded}",
          f"{shape}")
      for shape, wanted, padded in (
          ((512,), (128, 4), (128, 4)), ((1, 128, 4), (128, 4), (128, 4)), ((128, 4), (128, 8), (128, 8)),
          ((128, 4), (129, 4), (256, 4)), ((128, 4), (128, 5), (128, 8)), ((128, 4), (0, 4), (0, 4)))),
    row("columnwise scales in rows", calling("quantize", X, "nvfp4", scales="marlin-64"), ValueError,
        "layout marlin-64", "the transpose", "recipe nvfp4 has rows of E4M3 scales"),
    # packing_of, check_scales_to_pack
    row("an unknown layout", calling("pack_scales", torch.ones(4, 4, dtype=torch.uint8), "4x4"), ValueError,
        "layout is '4x4'", "'128x4'"),
    row("scales of four dimensions", calling("pack_scales", torch.ones(1, 1, 4, 4, dtype=torch.uint8), "8x4"),
        ValueError, "scales are (R, C) or (B, R, C)", "(1, 1, 4, 4)"),
    row("sections of other rows", calling("pack_scales", torch.ones(4, 4, dtype=torch.uint8), "8x4",
        sections=torch.tensor([1, 2])), ValueError, "sections [1, 2]", "4 rows"),
    row("packed scales of another shape", calling("unpack_scales", torch.ones(4, 4, dtype=torch.uint8), (4, 4), "8x4"),
        ValueError, "packed scales has shape (8, 4)", "not (4, 4)"),
    row("float32 scales of bytes", calling("pack_scales", torch.ones(4, 4), "8x4"), TypeError, "scales is uint8"),
    row("scales with mantissas", calling("pack_scales", torch.full((4, 4), 1.5), "ue8m0-int32"), ValueError,
        "scales[0, 0] is 1.5", "round"),
    # check_out_dtype
    *(row(f"values of {dtype_name(dtype)}", lambda ops, dtype=dtype: ops.dequantize(operand(ops), dtype), TypeError,
          "dequantize gives float32, bfloat16 or float16", f"not {dtype_name(dtype)}")
      for dtype in (torch.float64, torch.int8, torch.float8_e4m3fn)),
    # check_history
    *(row(f"a history of {name}", calling("update_scale", torch.ones(4, 1), ONE, name), ValueError,
          f"recipe {name} takes no scale from a history", DELAYED) for name in FAMILIES),
    row("a history of float64", calling("update_scale", torch.ones(4, 1).double(), ONE, DELAYED), TypeError,
        "history is float32", "not float64"),
    row("scales of bfloat16", calling("update_scale", torch.ones(4, 1), ONE.bfloat16(), DELAYED), TypeError,
        "scale is float32", "not bfloat16"),
    *(row(f"a history {history} and scales {scale}",
          calling("update_scale", torch.ones(history), torch.ones(scale), DELAYED), ValueError, "history is (H, N)",
          "at least one row", "scale (N,)", f"{history} and {scale}")
      for history, scale in (((0, 1), (1,)), ((4,), (4,)), ((4, 2), (1,)), ((4, 1), ()), ((4, 1), (1, 1)))),
]  # fmt: skip


# Sections.

SIZES = torch.tensor([1, 2])
PADDING = ("pad_sections", "unpad_sections")
TAKE_SIZES = [*product(("quantize_grouped",), FAMILIES), *product(PADDING, ("mxfp4",))]


def quantizing_sections(name: str, *, x: torch.Tensor = X, **options: Any) -> Call:
    return calling("quantize_grouped", x, SIZES, name, **options)


SECTIONS: list[Row] = [
    # check_rotated
    *(row(f"half a group of columns of {name}", quantizing_sections(name, x=BF16[:, :24]), ValueError, f"recipe {name}",
          f"groups of {group}", "24 elements of x", "pad") for name, group in (("nvfp4-rht", 16), ("nvfp4-rht32", 32))),
    *(row(f"half a group of rows of {name}", quantizing_sections(name, x=BF16, columnwise=True), ValueError,
          f"recipe {name}", f"groups of {group}", "pad") for name, group in (("nvfp4-rht", 16), ("nvfp4-rht32", 32))),
    *(row(f"columnwise sections of float32 of {name}",
          calling("quantize_grouped", torch.ones(96, 32), torch.tensor([32, 64]), name, columnwise=True), TypeError,
          f"recipe {name} rotates bfloat16", "not float32", "convert it") for name in ("nvfp4-rht", "nvfp4-rht32")),
    # check_random, check_random_of_sections
    *(row(f"no random bits of sections of {name}", quantizing_sections(name), ValueError,
          f"recipe {name} rounds stochastically", "random=(seed, offset)") for name in STOCHASTIC),
    *(row(f"a seed alone of sections of {name}", quantizing_sections(name, random=7), TypeError, "random",
          "(seed, offset)", "not 7") for name in STOCHASTIC),
    *(row(f"words {shape} of sections of {name}", quantizing_sections(name, random=words(*shape)), ValueError,
          "sections", "random=(seed, offset)", "not words") for name in STOCHASTIC for shape in ((3, 8), (3, 7))),
    *(row(f"words of sections of {name}", quantizing_sections(name, random=words(3, 8)), ValueError,
          f"recipe {name} rounds nearest-even", "no random bits") for name in FAMILIES),
    # check_scale
    row("no scale of two sections", quantizing_sections(DELAYED), ValueError, "takes scale", "float32 (2,)"),
    row("one scale of two sections", quantizing_sections(DELAYED, scale=ONE), ValueError, "scale has shape (2,)",
        "not (1,)"),
    # check_amax
    *(row(f"an amax of shape {shape} of two sections of {name}", quantizing_sections(name, amax=torch.ones(shape)),
          ValueError, "amax has shape (2,)", f"not {shape}")
      for name in ("nvfp4", CURRENT) for shape in ((1,), (3,), (2, 1))),
    # check_section_recipe
    row("sections with an amax for every row", quantizing_sections("nvfp4-rowscaled"), ValueError,
        "recipe nvfp4-rowscaled has an amax for every row", "a section has a single amax"),
    # check_sizes
    *(row(f"{method} {name} sizes of {dtype_name(dtype)}", calling(method, X, SIZES.to(dtype), name), TypeError,
          "sizes is int64", f"not {dtype_name(dtype)}")
      for (method, name), dtype in product(TAKE_SIZES, (torch.int32, FP32))),
    *(row(f"{method} {name} sizes of shape {shape}", calling(method, X, torch.ones(shape, dtype=torch.int64), name),
          ValueError, "sizes", "(G,)", "G at least 1", f"not {shape}")
      for (method, name), shape in product(TAKE_SIZES, ((), (0,), (1, 1)))),
    # section_rows
    *(row(f"{method} {name} sizes {sizes}", calling(method, X, torch.tensor(sizes), name), ValueError, "sizes",
          "not negative", "sum to the 3 rows of x", f"{sizes}, sum {sum(sizes)}")
      for (method, name), sizes in product(TAKE_SIZES[:-1], ([1, 1], [1, 1, 2], [4, -1]))),
    *(row(f"{method} of a scalar", calling(method, ONE[0], SIZES, "mxfp4"), ValueError, "(M, …)", "not shape ()")
      for method in PADDING),
    # padded_rows
    *(row(f"{rows} rows of padded sections {sizes} of {name}",
          calling("unpad_sections", torch.ones(rows, 3), torch.tensor(sizes), name), ValueError, "sizes",
          "not negative", f"padded to multiples of {alignment}", f"sum to the {rows} rows of y",
          f"{sizes}, padded {padded}")
      for name, alignment, rows, sizes, padded in (
          ("mxfp4", 32, 20, [15, 5], 64), ("nvfp4", 128, 64, [15, 5], 256), (CURRENT, 16, 20, [3, 17], 48),
          ("mxfp4", 32, 64, [65, -32], 64))),
]  # fmt: skip


# Products.


def operand(ops: Any, name: str = "nvfp4", rows: int = 3, columns: int = 32) -> Any:
    return ops.quantize(torch.ones(rows, columns).bfloat16(), name)


def multiplying(left: str = MX, right: str = MX, *, columns: int = 32, into: str | None = None, **options: Any) -> Call:
    """`gemm` of (3, 32) by (3, `columns`), or `gemm_quantized` to the recipe `into`."""

    def call(ops: Any) -> object:
        a, b = operand(ops, left), operand(ops, right, columns=columns)
        given = {"out_dtype": FP32, **options}
        return ops.gemm(a, b, **given) if into is None else ops.gemm_quantized(a, b, into, **given)

    return call


def multiplying_sections(
    right: str = MX,
    *,
    columns: int = 32,
    heights: Sequence[int] = (3, 3),
    columnwise: bool = False,
    **options: Any,
) -> Call:
    """`gemm_grouped` of two sections (3, 32) by matrices (height, `columns`)."""

    def call(ops: Any) -> object:
        a = ops.quantize_grouped(BF16, SIZES, MX, columnwise=columnwise)
        b = [operand(ops, right, height, columns) for height in heights]
        return ops.gemm_grouped(a, b, **{"out_dtype": FP32, **options})

    return call


def quantizing_product(left: str = MX, right: str = MX, **options: Any) -> Call:
    return multiplying(left, right, **{"into": MX, **options})


PRODUCES: dict[str, Callable[..., Call]] = {"gemm": multiplying, "gemm_quantized": quantizing_product}

PRODUCTS: list[Row] = [
    # check_pair
    *(row(f"{method} of {left} by {right}", call(left, right), ValueError, f"cannot multiply {left} by {right}", *named)
      for (method, call), (left, right, *named) in product(PRODUCES.items(), (
          (MX, "nvfp4", "scale", "E8M0", "E4M3"),
          ("nvfp4", "nvfp4-rht", "transform", "None", "Hadamard(group=16", "both operands have the same"),
          ("fp8-current-e5m2", "fp8-current-e5m2", "element", "E5M2", "one of the two has to be E4M3")))),
    row("gemm_grouped by another recipe", multiplying_sections("nvfp4"), ValueError, f"cannot multiply {MX} by nvfp4",
        "scale", "E8M0", "E4M3"),
    # check_columns
    *(row(f"{method} of another K", call(columns=48), ValueError, "(M, K) by (N, K)", "K is 32 in a (3, 32)",
          "48 in b (3, 48)") for method, call in PRODUCES.items()),
    row("gemm_grouped of another K", multiplying_sections(columns=48), ValueError, "(M, K) by (N, K)", "K is 32", "b[",
        "(3, 48)"),
    # check_sections_of_product
    row("columnwise sections", multiplying_sections(columnwise=True), ValueError, "gemm_grouped", "rowwise",
        "columnwise"),
    *(row(f"two sections by {count} matrices", multiplying_sections(heights=(3,) * count), ValueError,
          "every section by its own matrix", "2 sections", f"{count} matrices in b") for count in (0, 1, 3)),
    row("matrices of different N", multiplying_sections(heights=(4, 5)), ValueError, "output (3, N)", "4, 5 rows"),
    # check_scale
    row("no scale of a product", quantizing_product(into=DELAYED), ValueError, f"recipe {DELAYED} takes scale",
        "float32 (1,)"),
    row("a scale of a product", quantizing_product(scale=ONE), ValueError, f"recipe {MX} computes its own scales"),
    row("a scale of float64 of a product", quantizing_product(into=DELAYED, scale=ONE.double()), TypeError,
        "scale is float32", "not float64"),
    row("two scales of a product", quantizing_product(into=DELAYED, scale=torch.ones(2)), ValueError,
        "scale has shape (1,)", "not (2,)"),
    # check_epilogue
    *(row(f"{method} {name}", call(**options), error, *fragments)
      for (method, call), (name, options, error, *fragments) in product(
          [*PRODUCES.items(), ("gemm_grouped", multiplying_sections)], (
              ("output of float64", {"out_dtype": torch.float64}, TypeError,
               "a GEMM gives float32, bfloat16 or float16", "not float64"),
              ("c of int32", {"c": torch.ones(3, 3).int()}, TypeError, "c is float32, bfloat16, float16", "not int32"),
              ("c of shape (3, 4)", {"c": torch.ones(3, 4)}, ValueError, "c has shape (3, 3)", "not (3, 4)"),
              ("c of shape (3,)", {"c": torch.ones(3)}, ValueError, "c has shape (3, 3)", "not (3,)"),
              ("bias of float64", {"bias": torch.ones(3).double()}, TypeError, "bias is float32, bfloat16, float16",
               "not float64"),
              ("bias of shape (2,)", {"bias": torch.ones(2)}, ValueError, "bias has shape", "3", "not (2,)"),
              ("bias of shape (1, 3)", {"bias": torch.ones(1, 3)}, ValueError, "bias has shape", "3", "not (1, 3)")))),
    row("one bias of two sections", multiplying_sections(bias=torch.ones(3)), ValueError, "bias has shape (2, 3)",
        "not (3,)"),
]  # fmt: skip


# Layers.

Kind = tuple[Any, ...]
"""The name of a layer, and its sizes."""

LINEAR, NORM, GROUPED = ("Linear", 32, 16), ("LayerNormLinear", 32, 16), ("GroupedLinear", 1, 32, 16)
TRANSFORMER = ("TransformerLayer", 32, 48, 4)
LAYERS: tuple[Kind, ...] = (LINEAR, NORM, GROUPED)
TWO_GROUPS = ("GroupedLinear", 2, 32, 16)
HELD = {"accumulate": True, "quantized_parameters": True}
WEIGHT = torch.ones(16, 32)
TRAINING = "MXFP8BlockScaling"


def made(ops: Any, kind: Kind, **options: Any) -> Any:
    return getattr(ops, kind[0])(*kind[1:], **options)


def forward(kind: Kind, x: torch.Tensor, *, under: str | None = None, **options: Any) -> Call:
    """The forward pass of a new layer, a GroupedLinear of one group, under a training recipe."""
    splits = [[x.shape[:-1].numel()]] if kind[0] == "GroupedLinear" else []

    def call(ops: Any) -> object:
        with autocast(under):
            return made(ops, kind, **options)(x, *splits)

    return call


def other_history(ops: Any) -> None:
    """Two forward passes under amax histories of different lengths."""
    layer = made(ops, LINEAR)
    for length in (2, 3):
        with autocast(f"DelayedScaling-history{length}"):
            layer(BF16)


def splitting(splits: list[int]) -> Call:
    return lambda ops: made(ops, ("GroupedLinear", 3, 32, 16))(BF16.expand(2, 3, 32), splits)


def writing(kind: Kind, weights: Any, under: str | None = TRAINING, **options: Any) -> Call:
    return lambda ops: made(ops, kind, **options).write_weight(weights, under)


def reading(under: str | None) -> Call:
    """The forward pass of a layer whose weight was written under `TRAINING`."""

    def call(ops: Any) -> object:
        layer = made(ops, LINEAR, **HELD)
        layer.write_weight(WEIGHT, TRAINING)
        with autocast(under):
            return layer(BF16)

    return call


def accumulating(main_grad: torch.Tensor, *, held: bool) -> Call:
    """The forward pass of a layer with this main gradient: of its parameter, or its own if it holds codes."""

    def call(ops: Any) -> object:
        layer = made(ops, LINEAR, accumulate=True, quantized_parameters=held)
        if held:
            layer.write_weight(WEIGHT, TRAINING)
        (layer if held else layer.weight).main_grad = main_grad
        with autocast(TRAINING):
            return layer(BF16)

    return call


OF_LAYERS: list[Row] = [
    # check_layer
    *(row(f"{kind[0]} {name}", calling(*kind, **options), error, kind[0], *fragments)
      for kind, (name, options, error, *fragments) in product(LAYERS, (
          ("of float64", {"dtype": torch.float64}, TypeError, "float32, bfloat16 or float16", "not float64"),
          ("of seed -1", {"seed": -1}, ValueError, "seed", "64 bits", "not -1"),
          ("of seed 2^64", {"seed": 1 << 64}, ValueError, "seed", "64 bits", "not 18446744073709551616"),
          ("of codes without main_grad", {"quantized_parameters": True}, ValueError, "quantized_parameters",
           "main_grad", "give accumulate=True")))),
    *(row(f"{name} of {inner} and {outer} features", calling(name, inner, outer), ValueError,
          f"{name} has at least one feature", f"not {inner} and {outer}")
      for name, (inner, outer) in product(("Linear", "LayerNormLinear"), ((0, 16), (16, 0), (-1, 16)))),
    row("TransformerLayer of float64", calling(*TRANSFORMER, dtype=torch.float64), TypeError,
        "float32, bfloat16 or float16", "not float64"),
    # check_norm
    *(row(f"{kind[0]} of norm {norm!r}", calling(*kind, norm=norm), ValueError, "norm of LayerNormLinear", "layer, rms",
          f"not {norm!r}") for kind, norm in product((NORM, TRANSFORMER), ("batch", "", None))),
    *(row(f"{kind[0]} of eps {eps}", calling(*kind, eps=eps), ValueError, "eps of LayerNormLinear", "above 0",
          f"not {eps}") for kind, eps in product((NORM, TRANSFORMER), (0, -1e-5, float("nan")))),
    # check_groups
    *(row(f"{groups} groups", calling("GroupedLinear", groups, 32, 16), ValueError,
          "GroupedLinear has at least one group", f"not {groups}") for groups in (0, -1)),
    # check_heads
    *(row(f"{heads} heads", calling("TransformerLayer", 32, 48, heads), ValueError, "heads", "divide", "hidden size",
          f"{heads} do not divide 32") for heads in (0, 5, -4, 64)),
    # check_input
    *(row(f"{kind[0]} of {name}", forward(kind, x, under=under, dtype=dtype), error, kind[0], *fragments)
      for kind, (name, x, under, dtype, error, *fragments) in product(LAYERS, (
          ("float32", X, None, torch.bfloat16, TypeError, "of bfloat16 takes x", "not float32", "convert it"),
          ("31 columns", BF16[:, :31], None, torch.bfloat16, ValueError, "takes x (…, 32)", "not shape (3, 31)"),
          ("a scalar", BF16[0, 0], None, torch.bfloat16, ValueError, "takes x (…, 32)", "not shape ()"),
          ("a rotation of float16", X.half(), "NVFP4BlockScaling-nosr", torch.float16, TypeError,
           "NVFP4BlockScaling-nosr rotates bfloat16", "has the dtype float16", "use bfloat16",
           "NVFP4BlockScaling-norht")))),
    # check_rotated_rows
    *(row(f"{kind[0]} of half a group of rows", forward(kind, BF16[:1].expand(3, 5, 32), under="NVFP4BlockScaling"),
          ValueError, "NVFP4BlockScaling rotates groups of 16 rows", "x of shape (3, 5, 32) has 15", "pad it",
          "NVFP4BlockScaling-norht") for kind in (LINEAR, NORM)),
    # check_batch
    *(row(f"TransformerLayer of x {shape}", forward(TRANSFORMER, torch.ones(shape).bfloat16()), ValueError,
          "TransformerLayer takes x (B, S, 32)", f"not shape {shape}")
      for shape in ((16, 32), (2, 16, 48), (1, 2, 16, 32))),
    # check_splits
    *(row(f"splits {splits}", splitting(splits), ValueError, "m_splits are 3 numbers of rows", "not negative",
          "the 6 rows of x (2, 3, 32)", f"these are {splits}")
      for splits in ([3, 3], [2, 2, 1], [2, 2, 3], [8, -2, 0], [], [2, 2, 1, 1])),
    # check_history_length
    row("another length of the history", other_history, ValueError, "amax history of this Linear has 2 rows",
        "DelayedScaling-history3 has 3", "set its amax_history to None"),
    # check_holds_quantized
    *(row(f"write_weight of a {kind[0]} of parameters", writing(kind, WEIGHT.unsqueeze(0)), RuntimeError,
          f"{kind[0]} without quantized_parameters", "quantized_parameters=True") for kind in LAYERS),
    # check_active
    row("write_weight without a recipe", writing(LINEAR, WEIGHT, None, **HELD), RuntimeError, "write_weight",
        "no autocast is active", "give recipe="),
    # check_masters
    row("a weight of another shape", writing(LINEAR, WEIGHT.T, **HELD), ValueError, "write_weight",
        "has shape (16, 32)", "not (32, 16)"),
    row("a weight of float64", writing(LINEAR, WEIGHT.double(), **HELD), TypeError, "write_weight",
        "float32, bfloat16, float16", "not float64"),
    *(row(f"{count} weights of two groups", writing(TWO_GROUPS, torch.ones(count, 16, 32), **HELD), ValueError,
          "write_weight takes 2 weights (16, 32)", f"not {count}") for count in (1, 3)),
    row("the second weight of another shape", writing(TWO_GROUPS, [WEIGHT, WEIGHT[:, :31]], **HELD), ValueError,
        "write_weight", "has shape (16, 32)", "not (16, 31)"),
    # check_written
    row("a weight that was not written", forward(LINEAR, BF16, under=TRAINING, **HELD), RuntimeError,
        "quantized weight (16, 32) was not written", "call write_weight", "load a state"),
    *(row(f"a weight of MXFP8 {active}", reading(under), ValueError,
          "weight (16, 32) was written under MXFP8BlockScaling", active, "autocast", "write_weight again")
      for under, active in (("Float8BlockScaling", "under Float8BlockScaling"), (None, "in high precision"))),
    # check_main_grad
    *(row(f"main_grad {name} of {'codes' if held else 'a parameter'}", accumulating(main_grad, held=held), error,
          "main_grad of weight", *fragments)
      for held, (name, main_grad, error, *fragments) in product((False, True), (
          ("of bfloat16", WEIGHT.bfloat16(), TypeError, "is float32", "not bfloat16"),
          ("of another shape", WEIGHT.T, ValueError, "has shape (16, 32)", "not (32, 16)"),
          ("elsewhere", WEIGHT.to("meta"), ValueError, "lies on meta", "weight on cpu", "move it")))),
    # check_delays
    *(row(f"backward_dw of a {kind[0]}", lambda ops, kind=kind: made(ops, kind).backward_dw(), RuntimeError,
          f"{kind[0]} has no gradients waiting", "delay_wgrad=True") for kind in LAYERS),
]  # fmt: skip


# Shards. That both sides call these checks is tested in tests/test_parallel.py, by processes of a group.

Shapes = list[tuple[int, int]]


def check_extents(name: str, dim: int, shapes: Shapes, *, rowwise: bool = True, columnwise: bool = True) -> None:
    module_arguments.check_extents(shapes, find_recipe(name), dim, rowwise=rowwise, columnwise=columnwise)


def checking_extents(name: str, dim: int, shapes: Shapes, **halves: bool) -> Call:
    return lambda _: check_extents(name, dim, shapes, **halves)


SHARDS: list[Row] = [
    row("another group", lambda _: module_arguments.check_group(dist.GroupMember.NON_GROUP_MEMBER), ValueError,
        "not in the group", "amax", "give a group with this process"),
    row("an amax for every row",
        lambda _: module_arguments.check_sharded_recipe(find_recipe("nvfp4-rowscaled")), ValueError,
        "recipe nvfp4-rowscaled has an amax for every row", "shards"),
    row("a process that failed", lambda _: module_arguments.check_failed_shard(3), ValueError, "process 2",
        "cannot quantize its shard", "the error that process 2 raised"),
    *(row(f"dimension {dim}", lambda _, dim=dim: module_arguments.check_dimension(dim), ValueError,
          "dimension 0 or 1", f"not {dim}") for dim in (2, -1)),
    row("unequal extents", checking_extents("nvfp4", 1, [(32, 16), (24, 16)]), ValueError, "dimension 1",
        "equal extents along the other dimension", "(32, 16), (24, 16)"),
    row("a block in two shards", checking_extents("nvfp4", 0, [(16, 32), (0, 32), (24, 32), (16, 32), (0, 32)]),
        ValueError, "recipe nvfp4 has blocks of 16 along dimension 0", "process 2 has 24 rows",
        "(16, 32), (0, 32), (24, 32)", "give every shard but the last a multiple of 16"),
    row("columns of a block in two shards", checking_extents(MX, 1, [(32, 16), (32, 32)], columnwise=False), ValueError,
        f"recipe {MX} has blocks of 32 along dimension 1", "process 0 has 16 columns", "a multiple of 32"),
    row("a tile in two shards", checking_extents("nvfp4-2d", 0, [(24, 16), (16, 16)], columnwise=False), ValueError,
        "recipe nvfp4-2d has blocks of 16 along dimension 0", "process 0 has 24 rows", "a multiple of 16"),
    row("a rotated group in two shards", checking_extents("nvfp4-rht64", 0, [(32, 16), (32, 16)]), ValueError,
        "recipe nvfp4-rht64 has blocks of 64 along dimension 0", "process 0 has 32 rows", "a multiple of 64"),
]  # fmt: skip


BOTH_SIDES = [*QUANTIZING, *SECTIONS, *PRODUCTS, *OF_LAYERS]


def raised(mistake: Row, ops: ModuleType) -> str:
    """The message of the error. Checks the type, and the parts that the row names."""
    with pytest.raises(mistake.error) as caught:
        mistake.call(ops)
    assert type(caught.value) is mistake.error
    message = str(caught.value)
    assert [fragment for fragment in mistake.fragments if fragment not in message] == []
    return message


@pytest.mark.parametrize("mistake", BOTH_SIDES, ids=lambda mistake: mistake.name)
def test_both_sides_name_argument_value_and_remedy(mistake: Row) -> None:
    assert raised(mistake, native) == raised(mistake, reference)


@pytest.mark.parametrize("ops", [reference, native], ids=["reference", "native"])
def test_a_weight_of_a_second_recipe_is_an_error_before_an_amax(ops: ModuleType) -> None:
    layer = made(ops, LINEAR, **HELD)
    layer.write_weight(WEIGHT, TRAINING)
    with pytest.raises(ValueError, match=f"written under {TRAINING}"), autocast("DelayedScaling-history2"):
        layer(BF16)
    assert layer.amax_history is None


@pytest.mark.parametrize("mistake", SHARDS, ids=lambda mistake: mistake.name)
def test_an_error_of_shards_names_process_extent_and_remedy(mistake: Row) -> None:
    raised(mistake, reference)


def test_every_check_has_a_row() -> None:
    """The tracebacks of all rows contain every function of the two modules that can raise an error."""
    modules = (arguments, module_arguments)
    checks = {
        name
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
    }
    files, seen = {module.__file__ for module in modules}, set()
    for mistake in (*BOTH_SIDES, *SHARDS):
        try:
            mistake.call(reference)
        except Exception as error:  # types: `test_both_sides_name_argument_value_and_remedy`
            seen |= {frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files}
    assert checks - seen == {"dtype_name", "step_of"}


@pytest.mark.parametrize(
    ("name", "dim", "halves", "step"),
    [
        ("nvfp4", 0, (True, True), 16),
        ("nvfp4", 0, (True, False), 1),
        ("nvfp4", 1, (True, False), 16),
        ("nvfp4", 1, (False, True), 1),
        ("nvfp4-2d", 0, (True, False), 16),
        ("nvfp4-rht64", 0, (False, True), 64),
        ("nvfp4-rht64", 0, (True, False), 1),
        ("nvfp4-rht64", 1, (True, True), 16),
        ("nvfp4-rht2", 0, (True, True), 16),
        (MX, 0, (True, True), 32),
        ("fp8-block-128x128", 1, (False, True), 128),
        (CURRENT, 0, (True, True), 1),
    ],
)
def test_shards_are_multiples_of_blocks_tiles_and_rotated_groups(
    name: str, dim: int, halves: tuple[bool, bool], step: int
) -> None:
    rowwise, columnwise = halves
    assert module_arguments.step_of(find_recipe(name), dim, rowwise=rowwise, columnwise=columnwise) == step
    extents = (0, step, 3 * step, 0, 5, 0)
    shapes = [(extent, 7) if dim == 0 else (7, extent) for extent in extents]
    check_extents(name, dim, shapes, rowwise=rowwise, columnwise=columnwise)
