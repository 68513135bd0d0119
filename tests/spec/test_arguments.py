"""Argument checks: the reference and the native kernels raise the same error for the same mistake.

Each row of the table is one mistake. Its error names the argument, its value or shape, and the remedy or the expected
value.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.spec import arguments, module_arguments
from narrowgauge.spec.autocast import autocast
from narrowgauge.spec.recipes import recipe

Call = Callable[[Any], object]
"""Calls one method of the ops module that it is given."""


class Row(NamedTuple):
    """One mistake: the call, and the exception that it raises on both sides."""

    name: str
    call: Call
    error: type[Exception]
    fragments: tuple[str, ...]
    """Parts of the message."""


def row(name: str, call: Call, error: type[Exception], *fragments: str) -> Row:
    return Row(name, call, error, fragments)


X = torch.ones(3, 32)
BF16 = X.bfloat16()
ONE = torch.ones(1)
FP32 = torch.float32
SIZES = torch.tensor([1, 2])
MX, BLOCK, CURRENT, DELAYED = "mxfp8-e4m3", "fp8-block-1x128-e4m3-pow2", "fp8-current-e4m3", "fp8-delayed-e4m3"
FAMILIES = ("nvfp4", MX, BLOCK, CURRENT)
"""One recipe for each kernel that quantizes; the two of FP8 differ in whether the tensor has an amax."""
METHODS: dict[str, tuple[torch.Tensor, ...]] = {
    "quantize": (), "quantize_both": (), "quantize_grouped": (torch.tensor([3]),),
}  # fmt: skip
"""Methods that quantize, and the arguments between x and the recipe: one section of three rows."""


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def calling(method: str, *given: Any, **options: Any) -> Call:
    """Calls `method` of an ops module."""
    return lambda ops: getattr(ops, method)(*given, **options)


def of_every_method(
    name: str, x: torch.Tensor, recipes: Sequence[str], error: type[Exception], *fragments: str, **options: Any
) -> Iterator[Row]:
    """One mistake in every method that quantizes, under each recipe. "RECIPE" in a fragment is the recipe's name."""
    for each in recipes:
        for method, sizes in METHODS.items():
            call = calling(method, x, *sizes, each, **(paired(options) if method == "quantize_both" else options))
            yield row(f"{method} {each} {name}", call, error, *(part.replace("RECIPE", each) for part in fragments))


def paired(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `quantize_both`, which takes an amax for each half."""
    return options | {"amax": (options["amax"],) * 2} if "amax" in options else options


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
    name: str = MX, heights: Sequence[int] = (4, 4), *, columnwise: bool = False, columns: int = 32, **options: Any
) -> Call:
    """`gemm_grouped` of two sections, three rows in all, by a matrix of each height."""

    def call(ops: Any) -> object:
        a = ops.quantize_grouped(BF16, SIZES, MX, columnwise=columnwise)
        b = [operand(ops, name, height, columns) for height in heights]
        return ops.gemm_grouped(a, b, **{"out_dtype": FP32, **options})

    return call


# Quantizing and multiplying.

ROWS: list[Row] = [
    # as_matrix
    *of_every_method("x of float64", X.double(), FAMILIES, TypeError, "x is float32, bfloat16, float16", "float64"),
    *(row(f"x of {dtype}", calling("quantize", X.to(dtype), "nvfp4"), TypeError, "x is float32, bfloat16, float16",
          str(dtype).removeprefix("torch.")) for dtype in (torch.int8, torch.int32, torch.uint8, torch.float8_e4m3fn)),
    *of_every_method("a vector", X[0], FAMILIES, ValueError, "(M, K)", "not shape (32,)", "reshape it"),
    row("a scalar", calling("quantize", X[0, 0], "nvfp4"), ValueError, "(M, K)", "not shape ()", "reshape it"),
    # check_halves
    *(row(f"{name} neither half", calling("quantize_both", X, name, rowwise=False, columnwise=False), ValueError,
          "quantize_both", "rowwise=True", "columnwise=True", "both are False") for name in FAMILIES),
    # check_rotation
    *(row(f"transform {name}", calling("transform", BF16, name), ValueError, f"recipe {name} has no transform",
          "nvfp4-rht") for name in ("nvfp4", "nvfp4-2d")),
    *(row(f"transform of shape {shape}", calling("transform", torch.ones(shape).bfloat16(), "nvfp4-rht"), ValueError,
          "recipe nvfp4-rht", "(M, K)", f"not shape {shape}", "reshape it") for shape in ((), (16,), (2, 3, 16))),
    *(row(f"transform of {dtype}", calling("transform", X.to(dtype), "nvfp4-rht"), TypeError,
          "recipe nvfp4-rht rotates bfloat16", str(dtype).removeprefix("torch."), "convert it")
      for dtype in (torch.float32, torch.float16, torch.float64)),
    *(row(f"transform of {columns} columns in groups of {group}",
          calling("transform", torch.ones(2, columns).bfloat16(), name), ValueError, f"recipe {name}",
          f"groups of {group}", f"{columns} elements of x (2, {columns})", "pad x")
      for name, group, columns in (("nvfp4-rht", 16, 8), ("nvfp4-rht", 16, 24), ("nvfp4-rht", 16, 33),
                                   ("nvfp4-rht32", 32, 48), ("nvfp4-rht128", 128, 64), ("nvfp4-rht2", 2, 3))),
    # check_rotated
    *of_every_method("x of float32", X, ("nvfp4-rht", "nvfp4-rht32"), TypeError, "recipe RECIPE rotates bfloat16",
                     "float32", "convert it"),
    *(row(f"quantize {name} of half a group", calling("quantize", BF16[:, :24], name), ValueError, f"recipe {name}",
          f"groups of {group}", "24 elements of x (3, 24)", "pad x")
      for name, group in (("nvfp4-rht", 16), ("nvfp4-rht32", 32))),
    *(row(f"quantize_both {name} of half a group of rows", calling("quantize_both", BF16.repeat(8, 1), name),
          ValueError, f"recipe {name}", f"groups of {group}", "24 elements of x", "pad x")
      for name, group in (("nvfp4-rht32", 32), ("nvfp4-rht-sr", 16)) if name != "nvfp4-rht-sr"),
    row("half a group of columns of sections", calling("quantize_grouped", BF16[:, :24], SIZES, "nvfp4-rht"),
        ValueError, "recipe nvfp4-rht", "groups of 16", "24 elements of x", "pad x"),
    row("half a group of rows of sections", calling("quantize_grouped", BF16, SIZES, "nvfp4-rht", columnwise=True),
        ValueError, "recipe nvfp4-rht", "groups of 16", "pad"),
    row("columnwise sections of float32 in groups", calling(
        "quantize_grouped", X.repeat(16, 1), torch.tensor([16, 32]), "nvfp4-rht", columnwise=True), TypeError,
        "recipe nvfp4-rht rotates bfloat16", "float32", "convert it"),
    # check_random
    *of_every_method("random bits", X, FAMILIES, ValueError, "recipe RECIPE rounds nearest-even", "no random bits",
                     random=(1, 2)),
    *(row(f"words of {name}", calling("quantize", X, name, random=words(3, 8)), ValueError,
          f"recipe {name} rounds nearest-even", "no random bits") for name in ("nvfp4-2d", "nvfp4-rowscaled", MX)),
    *(row(f"words of one half, {wanted}", calling("quantize_both", X, "nvfp4", random=(words(3, 8), words(32, 1)),
                                                 **wanted), ValueError, "recipe nvfp4", "no random bits")
      for wanted in ({"rowwise": False}, {"columnwise": False})),
    *(row(f"quantize {name} without random bits", calling("quantize", X, name), ValueError,
          f"recipe {name} rounds stochastically", "random=(seed, offset)", "int32 (3, 8)")
      for name in ("nvfp4-sr", "mxfp4-sr")),
    *(row(f"quantize_both {name} without random bits", calling("quantize_both", X, name, **wanted), ValueError,
          f"recipe {name} rounds stochastically", "random=(seed, offset)", f"int32 {shape}")
      for name in ("nvfp4-sr", "mxfp4-sr")
      for wanted, shape in (({"columnwise": False}, "(3, 8)"), ({"rowwise": False}, "(32, 1)"))),
    *(row(f"quantize_grouped {name} without random bits", calling("quantize_grouped", X, SIZES, name), ValueError,
          f"recipe {name} rounds stochastically", "random=(seed, offset)") for name in ("nvfp4-sr", "mxfp4-sr")),
    *(row(f"words of {dtype}", calling("quantize", X, "nvfp4-sr", random=words(3, 8).to(dtype)), TypeError,
          "random is int32", str(dtype).removeprefix("torch.")) for dtype in (torch.int64, torch.uint8, FP32)),
    *(row(f"words of shape {shape}", calling("quantize", X, "nvfp4-sr", random=words(*shape)), ValueError,
          "random has shape (3, 8)", f"not {shape}") for shape in ((3, 7), (3, 9), (8, 3), (24,))),
    *(row(f"words of {name} for the other half", calling("quantize_both", X, name, rowwise=False,
                                                         random=(None, words(3, 8))), ValueError,
          "random has shape (32, 1)", "not (3, 8)") for name in ("nvfp4-sr", "mxfp4-sr")),
    *(row(f"random={random!r}", calling("quantize", X, "nvfp4-sr", random=random), TypeError, "random", "words",
          "(seed, offset)", f"not {random!r}")
      for random in (7, (7,), (7, 8, 9), [7, 8], (7, 8.0), (True, 1), "seed")),
    row("a seed alone for sections", calling("quantize_grouped", X, SIZES, "mxfp4-sr", random=7), TypeError, "random",
        "(seed, offset)", "not 7"),
    # split_random
    *(row(f"{name} random={kind} for two halves", calling("quantize_both", X, name, random=random), TypeError,
          "random of two halves", "(seed, offset)", "words of either", kind)
      for name in ("nvfp4-sr", "mxfp4-sr")
      for kind, random in (("Tensor", words(3, 8)), ("tuple", (1, 2, 3)), ("tuple", (1, words(32, 1))),
                           ("tuple", (True, 1)), ("int", 7), ("list", [1, 2]))),
    # check_random_of_sections
    *(row(f"words of sections of {name}", calling("quantize_grouped", X, SIZES, name, random=words(3, 8)), ValueError,
          "sections", "random=(seed, offset)", "not words") for name in ("nvfp4-sr", "mxfp4-sr")),
    # check_scale
    *of_every_method("no scale", X, (DELAYED,), ValueError, "recipe RECIPE takes scale", "float32 (1,)"),
    *of_every_method("a scale", X, FAMILIES, ValueError, "recipe RECIPE makes its own scales", "takes none", scale=ONE),
    *of_every_method("a scale of float16", X, (DELAYED,), TypeError, "scale is float32", "float16", scale=ONE.half()),
    *of_every_method("two scales", X, (DELAYED,), ValueError, "scale has shape (1,)", "not (2,)", scale=torch.ones(2)),
    *of_every_method("a scalar scale", X, (DELAYED,), ValueError, "scale has shape (1,)", "not ()", scale=ONE[0]),
    row("no scale of two sections", calling("quantize_grouped", X, SIZES, DELAYED), ValueError, "takes scale",
        "float32 (2,)"),
    row("one scale of two sections", calling("quantize_grouped", X, SIZES, DELAYED, scale=ONE), ValueError,
        "scale has shape (2,)", "not (1,)"),
    row("no scale of a product", multiplying(into=DELAYED), ValueError, f"recipe {DELAYED} takes scale",
        "float32 (1,)"),
    row("a scale of a product", multiplying(into=MX, scale=ONE), ValueError, f"recipe {MX} makes its own scales"),
    row("a scale of a product of float64", multiplying(into=DELAYED, scale=ONE.double()), TypeError,
        "scale is float32", "float64"),
    row("two scales of a product", multiplying(into=DELAYED, scale=torch.ones(2)), ValueError, "scale has shape (1,)",
        "not (2,)"),
    # check_amax
    *of_every_method("an amax", X, (MX, "mxfp4-2d", BLOCK), ValueError, "recipe RECIPE has no tensor scale",
                     "takes no amax", amax=ONE),
    *(row(f"{name} a columnwise amax", calling("quantize_both", X, name, amax=(None, ONE)), ValueError,
          f"recipe {name} has no tensor scale", "takes no amax") for name in (MX, BLOCK)),
    *(each for dtype in (torch.float64, torch.bfloat16) for each in of_every_method(
        f"an amax of {dtype}", X, ("nvfp4", CURRENT), TypeError, "amax is float32", str(dtype).removeprefix("torch."),
        amax=ONE.to(dtype))),
    *(each for shape in ((), (2,), (1, 1)) for each in of_every_method(
        f"an amax of shape {shape}", X, ("nvfp4", CURRENT), ValueError, "amax has shape (1,)", f"not {shape}",
        amax=torch.ones(shape))),
    *(row(f"{name} a columnwise amax of float64", calling("quantize_both", X, name, amax=(ONE, ONE.double())),
          TypeError, "amax is float32", "float64") for name in ("nvfp4", CURRENT)),
    *(row(f"an amax of shape {shape} for three rows",
          calling("quantize", X, "nvfp4-rowscaled", amax=torch.ones(shape)), ValueError, "amax has shape (3,)",
          f"not {shape}") for shape in ((1,), (2,), (3, 1))),
    row("an amax of rows of float64", calling("quantize", X, "nvfp4-rowscaled", amax=torch.ones(3).double()),
        TypeError, "amax is float32", "float64"),
    row("a columnwise amax for rows",
        calling("quantize_both", X, "nvfp4-rowscaled", amax=(torch.ones(3), torch.ones(3))), ValueError,
        "amax has shape (32,)", "not (3,)"),
    *(row(f"{name} an amax of shape {shape} for two sections",
          calling("quantize_grouped", X, SIZES, name, amax=torch.ones(shape)), ValueError, "amax has shape (2,)",
          f"not {shape}") for name in ("nvfp4", CURRENT) for shape in ((1,), (3,), (2, 1))),
    # check_swizzled
    *(row(f"{method} {name} swizzled", calling(method, X, name, swizzled=True, scale=ONE if name == DELAYED else None),
          ValueError, f"recipe {name} has float32 scales", "128×4", "bytes")
      for method in ("quantize", "quantize_both") for name in (BLOCK, CURRENT, DELAYED)),
    # check_scales_matrix
    *(row(f"scales of {dtype}", calling("swizzle", torch.ones(4, 4).to(dtype)), TypeError, "scales is uint8",
          str(dtype).removeprefix("torch.")) for dtype in (FP32, torch.int8)),
    *(row(f"scales of shape {shape}", calling("swizzle", torch.ones(shape, dtype=torch.uint8)), ValueError,
          "scales are a matrix", f"not shape {shape}") for shape in ((), (512,), (1, 128, 4))),
    # check_out_dtype
    *(row(f"values of {dtype}", lambda ops, dtype=dtype: ops.dequantize(operand(ops), dtype), TypeError,
          "dequantize gives float32, bfloat16 or float16", str(dtype).removeprefix("torch."))
      for dtype in (torch.float64, torch.int8, torch.float8_e4m3fn)),
    *(row(f"{method} of float64", call, TypeError, "gemm gives float32, bfloat16 or float16", "float64")
      for method, call in (("gemm", multiplying(out_dtype=torch.float64)),
                           ("gemm_quantized", multiplying(into=MX, out_dtype=torch.float64)),
                           ("gemm_grouped", multiplying_sections(out_dtype=torch.float64)))),
    # check_history
    *(row(f"a history of {name}", calling("update_scale", torch.ones(4, 1), ONE, name), ValueError,
          f"recipe {name} takes no scale from a history", DELAYED) for name in FAMILIES),
    row("a history of float64", calling("update_scale", torch.ones(4, 1).double(), ONE, DELAYED), TypeError,
        "history is float32", "float64"),
    row("scales of bfloat16", calling("update_scale", torch.ones(4, 1), ONE.bfloat16(), DELAYED), TypeError,
        "scale is float32", "bfloat16"),
    *(row(f"a history {history} of scales {scale}",
          calling("update_scale", torch.ones(history), torch.ones(scale), DELAYED), ValueError, "history is (H, N)",
          "at least one row", "scale (N,)", f"{history} and {scale}")
      for history, scale in (((0, 1), (1,)), ((4,), (4,)), ((4, 2), (1,)), ((4, 1), ()), ((4, 1), (1, 1)))),
    # check_section_recipe
    row("sections with an amax for every row", calling("quantize_grouped", X, SIZES, "nvfp4-rowscaled"), ValueError,
        "recipe nvfp4-rowscaled has an amax for every row", "sections of one amax each"),
    # check_sizes, section_rows
    *(row(f"{method} {name} {sizes.dtype} sizes", calling(method, X, sizes, name), TypeError, "sizes is int64",
          str(sizes.dtype).removeprefix("torch."))
      for method, names in (("quantize_grouped", FAMILIES), ("pad_sections", ("mxfp4",)), ("unpad_sections", ("mxfp4",)))
      for name in names for sizes in (SIZES.int(), SIZES.float())),
    *(row(f"{method} {name} sizes of shape {shape}", calling(method, X, torch.ones(shape, dtype=torch.int64), name),
          ValueError, "sizes", "(G,)", "G at least 1", f"not {shape}")
      for method, names in (("quantize_grouped", FAMILIES), ("pad_sections", ("mxfp4",)), ("unpad_sections", ("mxfp4",)))
      for name in names for shape in ((), (0,), (1, 1))),
    *(row(f"{method} {name} sizes {sizes}", calling(method, X, torch.tensor(sizes), name), ValueError, "sizes",
          "not negative", "sum to the 3 rows of x", f"{sizes}, sum {sum(sizes)}")
      for method, names in (("quantize_grouped", FAMILIES), ("pad_sections", ("mxfp4",)))
      for name in names for sizes in ([1, 1], [1, 1, 2], [4, -1])),
    # padded_rows
    *(row(f"sizes {sizes} of {rows} padded rows, {name}",
          calling("unpad_sections", torch.ones(rows, 3), torch.tensor(sizes), name), ValueError, "sizes",
          "not negative", f"padded to multiples of {alignment}", f"sum to the {rows} rows of y",
          f"{sizes}, padded {padded}")
      for name, alignment, rows, sizes, padded in (
          ("mxfp4", 32, 20, [15, 5], 64), ("nvfp4", 128, 64, [15, 5], 256), (CURRENT, 16, 20, [3, 17], 48),
          ("mxfp4", 32, 64, [65, -32], 64))),
    # check_pair
    *(row(f"{method} {left} by {right}", call(left, right), ValueError, f"cannot multiply {left} by {right}", *named)
      for method, call in (("gemm", multiplying),
                           ("gemm_quantized", lambda left, right: multiplying(left, right, into="mxfp4")))
      for left, right, named in (
          (MX, "nvfp4", ("scale", "E8M0", "E4M3")),
          ("nvfp4", "nvfp4-rht", ("transform", "None", "Hadamard(group=16", "same")),
          ("fp8-current-e5m2", "fp8-current-e5m2", ("element", "E5M2", "E4M3")))),
    row("sections by another recipe", multiplying_sections("nvfp4"), ValueError, f"cannot multiply {MX} by nvfp4",
        "scale", "E8M0", "E4M3"),
    # check_columns
    *(row(f"{method} of another K", call, ValueError, "(M, K) by (N, K)", "K is 32 in a (3, 32)", "48 in b (3, 48)")
      for method, call in (("gemm", multiplying(columns=48)), ("gemm_quantized", multiplying(columns=48, into=MX)))),
    row("gemm_grouped of another K", multiplying_sections(columns=48), ValueError, "32", "(4, 48)"),
    # check_sections_of_product
    row("columnwise sections", multiplying_sections(columnwise=True), ValueError, "gemm_grouped", "rowwise",
        "columnwise"),
    *(row(f"two sections by {count} matrices", multiplying_sections(heights=(4,) * count), ValueError,
          "each section by one matrix", "2 sections", f"{count} of b") for count in (0, 1, 3)),
    row("matrices of different N", multiplying_sections(heights=(4, 5)), ValueError, "one output (3, N)", "4, 5 rows"),
    # check_epilogue
    *(row(f"{method} {name} {tuple(added.shape)} of {added.dtype}", call(**{name: added}), error,
          *(part.format(n=columns) for part in fragments))
      for method, columns, call in (("gemm", 3, multiplying), ("gemm_grouped", 4, multiplying_sections),
                                    ("gemm_quantized", 3, lambda **added: multiplying(into=MX, **added)))
      for name, added, error, fragments in (
          ("c", torch.ones(3, columns).int(), TypeError, ("c is float32, bfloat16, float16", "int32")),
          ("c", torch.ones(columns, 5), ValueError, ("c has shape (3, {n})", "not ({n}, 5)")),
          ("c", torch.ones(3), ValueError, ("c has shape (3, {n})", "not (3,)")),
          ("bias", torch.ones(columns).double(), TypeError, ("bias is float32, bfloat16, float16", "float64")),
          ("bias", torch.ones(2), ValueError, ("bias has shape", "{n}", "not (2,)")),
          ("bias", torch.ones(1, 3), ValueError, ("bias has shape", "{n}", "not (1, 3)")))),
    row("one bias for two sections", multiplying_sections(bias=torch.ones(4)), ValueError, "bias has shape (2, 4)",
        "not (4,)"),
]  # fmt: skip


# Layers.

LINEAR = ("Linear", 32, 16)
LAYERS = (LINEAR, ("LayerNormLinear", 32, 16), ("GroupedLinear", 1, 32, 16))
HELD = {"accumulate": True, "quantized_parameters": True}
TRAINING = "MXFP8BlockScaling"


def forward(
    kind: Sequence[Any], x: torch.Tensor, *splits: list[int], under: str | None = None, **options: Any
) -> Call:
    """The forward pass of a new layer under a training recipe."""

    def call(ops: Any) -> object:
        layer = getattr(ops, kind[0])(*kind[1:], **options)
        with autocast(under):
            return layer(x, *splits)

    return call


def other_history(ops: Any) -> None:
    """Two forward passes under amax histories of different lengths."""
    layer = ops.Linear(32, 16)
    for length in (2, 3):
        with autocast(f"DelayedScaling-history{length}"):
            layer(BF16)


def writing(kind: Sequence[Any], weights: Any, under: str | None = TRAINING, **options: Any) -> Call:
    return lambda ops: getattr(ops, kind[0])(*kind[1:], **options).write_weight(weights, under)


def reading(under: str | None) -> Call:
    """The forward pass of a layer whose weight was written under `TRAINING`."""

    def call(ops: Any) -> object:
        layer = ops.Linear(32, 16, **HELD)
        layer.write_weight(torch.ones(16, 32), TRAINING)
        with autocast(under):
            return layer(BF16)

    return call


def with_main_grad(main: torch.Tensor, **options: Any) -> Call:
    """The forward pass of a layer with this main gradient."""

    def call(ops: Any) -> object:
        layer = ops.Linear(32, 16, accumulate=True, **options)
        if options:
            layer.write_weight(torch.ones(16, 32), TRAINING)
        setattr(layer if options else layer.weight, "main_grad", main)
        with autocast(TRAINING if options else None):
            return layer(BF16)

    return call


LAYER_ROWS: list[Row] = [
    # check_layer
    *(row(f"{kind[0]} {name}", calling(*kind, **options), error, kind[0], *fragments)
      for kind in LAYERS for name, options, error, fragments in (
          ("of float64", {"dtype": torch.float64}, TypeError, ("float32, bfloat16 or float16", "not float64")),
          ("seed -1", {"seed": -1}, ValueError, ("seed", "64 bits", "not -1")),
          ("seed 2^64", {"seed": 1 << 64}, ValueError, ("seed", "64 bits", "not 18446744073709551616")),
          ("with a .grad", {"quantized_parameters": True}, ValueError, ("quantized_parameters", "main_grad",
                                                                        "give accumulate=True")))),
    *(row(f"{kind} {features} features", calling(kind, *features), ValueError, f"{kind} has at least one feature",
          f"not {features[0]} and {features[1]}")
      for kind in ("Linear", "LayerNormLinear") for features in ((0, 16), (16, 0), (-1, 16))),
    row("TransformerLayer of float64", calling("TransformerLayer", 32, 48, 4, dtype=torch.float64), TypeError,
        "float32, bfloat16 or float16", "not float64"),
    # check_norm
    *(row(f"{kind[0]} norm {norm!r}", calling(*kind, norm=norm), ValueError, "norm of LayerNormLinear", "layer, rms",
          f"not {norm!r}")
      for kind in (LAYERS[1], ("TransformerLayer", 32, 48, 4)) for norm in ("batch", "", None)),
    *(row(f"eps {eps}", calling(*LAYERS[1], eps=eps), ValueError, "eps of LayerNormLinear", "above 0", f"not {eps}")
      for eps in (0, -1e-5, float("nan"))),
    # check_groups
    *(row(f"{groups} groups", calling("GroupedLinear", groups, 32, 16), ValueError,
          "GroupedLinear has at least one group", f"not {groups}") for groups in (0, -1)),
    # check_heads
    *(row(f"{heads} heads", calling("TransformerLayer", 32, 48, heads), ValueError, "heads", "divide",
          "hidden size", f"{heads} do not divide 32") for heads in (0, 5, -4, 64)),
    # check_input
    *(row(f"{kind[0]} {name}", forward(kind, x, *([[3]] if "Grouped" in kind[0] else []), under=under, **options),
          error, kind[0], *fragments)
      for kind in LAYERS for name, x, under, options, error, fragments in (
          ("x of float32", X, None, {}, TypeError, ("of bfloat16 takes x", "not float32", "convert it")),
          ("31 features", BF16[:, :31], None, {}, ValueError, ("takes x (…, 32)", "not shape (3, 31)")),
          ("a scalar", BF16[0, 0], None, {}, ValueError, ("takes x (…, 32)", "not shape ()")),
          ("of float16 rotated", X.half(), "NVFP4BlockScaling-nosr", {"dtype": torch.float16}, TypeError,
           ("NVFP4BlockScaling-nosr rotates bfloat16", "is of float16", "make it of bfloat16",
            "NVFP4BlockScaling-norht")))),
    # check_rotated_rows
    *(row(f"{kind[0]} half a group of rows", forward(kind, torch.ones(3, 5, 32).bfloat16(), under="NVFP4BlockScaling"),
          ValueError, "NVFP4BlockScaling rotates groups of 16 rows", "x of shape (3, 5, 32) has 15", "pad it",
          "NVFP4BlockScaling-norht") for kind in LAYERS[:2]),
    # check_batch
    *(row(f"TransformerLayer of x {shape}", forward(("TransformerLayer", 32, 48, 4), torch.ones(shape).bfloat16()),
          ValueError, "TransformerLayer takes x (B, S, 32)", f"not shape {shape}")
      for shape in ((16, 32), (2, 16, 48), (1, 2, 16, 32))),
    # check_splits
    *(row(f"splits {splits}", forward(("GroupedLinear", 3, 32, 16), BF16.expand(2, 3, 32), splits), ValueError,
          "m_splits are 3 numbers of rows", "not negative", "the 6 rows of x (2, 3, 32)", f"these are {splits}")
      for splits in ([3, 3], [2, 2, 1], [2, 2, 3], [8, -2, 0], [], [2, 2, 1, 1])),
    # check_history_length
    row("another length of the history", other_history, ValueError, "amax history of this Linear has 2 rows",
        "DelayedScaling-history3 has 3", "set its amax_history to None"),
    # check_holds_quantized
    *(row(f"write_weight of a {kind[0]} of parameters", writing(kind, torch.ones(1, 16, 32)), RuntimeError,
          f"{kind[0]} without quantized_parameters", "quantized_parameters=True") for kind in LAYERS),
    # check_active
    row("write_weight without a recipe", writing(LINEAR, torch.ones(16, 32), None, **HELD), RuntimeError,
        "write_weight", "autocast", "none is active", "give recipe="),
    # check_masters
    row("a weight of another shape", writing(LINEAR, torch.ones(32, 16), **HELD), ValueError, "write_weight",
        "has shape (16, 32)", "not (32, 16)"),
    row("a weight of float64", writing(LINEAR, torch.ones(16, 32).double(), **HELD), TypeError, "write_weight",
        "float32, bfloat16, float16", "not float64"),
    *(row(f"{count} weights for two groups", writing(("GroupedLinear", 2, 32, 16), torch.ones(count, 16, 32), **HELD),
          ValueError, "write_weight takes 2 weights (16, 32)", f"not {count}") for count in (1, 3)),
    row("a weight of another shape for the second group",
        writing(("GroupedLinear", 2, 32, 16), [torch.ones(16, 32), torch.ones(16, 31)], **HELD), ValueError,
        "write_weight", "has shape (16, 32)", "not (16, 31)"),
    # check_written
    row("a weight that was not written", forward(LINEAR, BF16, under=TRAINING, **HELD), RuntimeError,
        "quantized weight (16, 32) was not written", "call write_weight", "load a state"),
    row("a weight of another recipe", reading("Float8BlockScaling"), ValueError,
        "weight (16, 32) was written under MXFP8BlockScaling", "under Float8BlockScaling", "autocast",
        "write_weight again"),
    row("a quantized weight in high precision", reading(None), ValueError,
        "weight (16, 32) was written under MXFP8BlockScaling", "in high precision", "autocast", "write_weight again"),
    # check_main_grad
    *(row(f"main_grad {name}, {options}", with_main_grad(main, **options), error, "main_grad of weight", *fragments)
      for options in ({}, {"quantized_parameters": True}) for name, main, error, fragments in (
          ("of bfloat16", torch.ones(16, 32).bfloat16(), TypeError, ("is float32", "not bfloat16")),
          ("of another shape", torch.ones(32, 16), ValueError, ("has shape (16, 32)", "not (32, 16)")),
          ("elsewhere", torch.ones(16, 32, device="meta"), ValueError, ("lies on meta", "weight on cpu", "move it")))),
    # check_delays
    *(row(f"backward_dw of a {kind[0]}", lambda ops, kind=kind: getattr(ops, kind[0])(*kind[1:]).backward_dw(),
          RuntimeError, f"{kind[0]} has no gradients waiting", "delay_wgrad=True") for kind in LAYERS),
]  # fmt: skip

# Shards. tests/test_parallel.py checks that both sides call these.


def check_shapes(name: str, dim: int, *shapes: tuple[int, int], **halves: bool) -> None:
    """`check_extents`, of both halves unless `halves` names one."""
    wanted = {"rowwise": True, "columnwise": True} | halves
    module_arguments.check_extents(shapes, recipe(name), dim, **wanted)


SHARD_ROWS: list[Row] = [
    row("another group", lambda _: module_arguments.check_group(dist.GroupMember.NON_GROUP_MEMBER), ValueError,
        "not in the group", "amax", "give it the group it is in"),
    row("an amax for every row", lambda _: module_arguments.check_sharded_recipe(recipe("nvfp4-rowscaled")), ValueError,
        "recipe nvfp4-rowscaled has an amax for every row", "shards"),
    row("a process that failed", lambda _: module_arguments.check_failed_shard(3), ValueError, "process 2",
        "cannot quantize its shard", "its own error"),
    *(row(f"shards along dimension {dim}", lambda _, dim=dim: module_arguments.check_dimension(dim), ValueError,
          "dimension 0 or 1", f"not {dim}") for dim in (2, -1)),
    row("shards of different extents", lambda _: check_shapes("nvfp4", 1, (32, 16), (24, 16)), ValueError,
        "dimension 1", "one extent", "(32, 16), (24, 16)"),
    row("a block in two shards", lambda _: check_shapes("nvfp4", 0, (16, 32), (0, 32), (24, 32), (16, 32), (0, 32)),
        ValueError, "recipe nvfp4 has blocks of 16 along dimension 0", "process 2 has 24 rows", "multiple of 16",
        "(16, 32), (0, 32), (24, 32)"),
    row("columns of a block in two shards", lambda _: check_shapes(MX, 1, (32, 16), (32, 32), columnwise=False),
        ValueError, f"recipe {MX} has blocks of 32 along dimension 1", "process 0 has 16 columns", "multiple of 32"),
    row("a tile in two shards", lambda _: check_shapes("nvfp4-2d", 0, (24, 16), (16, 16), columnwise=False),
        ValueError, "recipe nvfp4-2d has blocks of 16 along dimension 0", "process 0 has 24 rows"),
    row("a rotated group in two shards", lambda _: check_shapes("nvfp4-rht64", 0, (32, 16), (32, 16)), ValueError,
        "recipe nvfp4-rht64 has blocks of 64 along dimension 0", "process 0 has 32 rows", "multiple of 64"),
]  # fmt: skip


def message(call: Call, ops: ModuleType, error: type[Exception]) -> tuple[str, set[str]]:
    """The message of the error that the call raises, and the names of the functions that it was raised through."""
    with pytest.raises(error) as caught:
        call(ops)
    assert type(caught.value) is error
    return str(caught.value), {frame.name for frame in traceback.extract_tb(caught.tb)}


EVERY_ROW = [*ROWS, *LAYER_ROWS, *SHARD_ROWS]


@pytest.mark.parametrize("ops", [reference, native], ids=["reference", "native"])
@pytest.mark.parametrize("mistake", [*ROWS, *LAYER_ROWS], ids=lambda mistake: mistake.name)
def test_the_error_names_the_argument_the_value_and_the_remedy(mistake: Row, ops: ModuleType) -> None:
    found, _ = message(mistake.call, ops, mistake.error)
    assert [fragment for fragment in mistake.fragments if fragment not in found] == [], found


@pytest.mark.parametrize("mistake", SHARD_ROWS, ids=lambda mistake: mistake.name)
def test_the_error_of_a_shard_names_the_argument_the_value_and_the_remedy(mistake: Row) -> None:
    found, _ = message(mistake.call, reference, mistake.error)
    assert [fragment for fragment in mistake.fragments if fragment not in found] == [], found


@pytest.mark.parametrize("mistake", [*ROWS, *LAYER_ROWS], ids=lambda mistake: mistake.name)
def test_both_sides_raise_the_same_message(mistake: Row) -> None:
    found, expected = (message(mistake.call, ops, mistake.error)[0] for ops in (native, reference))
    assert found == expected
