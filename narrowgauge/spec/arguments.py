"""Checks of the arguments of operations: reference and kernels raise the same error for the same mistake.

Every error names the argument, its value or shape, and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from narrowgauge.spec.dtypes import INPUT_DTYPES
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.quantized import GroupedQuantized, Half, Quantized, words_shape
from narrowgauge.spec.recipe import mismatch
from narrowgauge.spec.recipes import Delayed, Hadamard, Recipe
from narrowgauge.spec.scale_layouts import LAYOUTS, LINEAR, TILES, Layout, Packing, ScaleLayout, find_layout

Random = torch.Tensor | tuple[int, int]
"""Random bits of stochastic rounding. Either words, int32 (M, ⌈K/4⌉): element 4j + i of a row takes byte i of word j,
the lowest byte first. Or seed and offset of Philox, 64 bits each: subsequence n gives the four words of block n of 16
elements, counted along the rows; subsequences 2n and 2n + 1 give the words of block n of 32 elements."""

SIGN_AND_MANTISSA = -0x7F800001
"""Bits of a float32 number, as an int32, that are 0 in a power of two: all but the exponent."""


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def check_tensor(
    tensor: torch.Tensor, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int] | None = None
) -> None:
    """Raises TypeError for another dtype than `dtypes`, ValueError for another shape than `shape`."""
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {', '.join(map(dtype_name, dtypes))}, not {dtype_name(tensor.dtype)}")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(shape)}, not {tuple(tensor.shape)}")


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """`x` (…, K) as a matrix (M, K): all dimensions but the last become rows, as in Transformer Engine.

    Raises TypeError unless `x` is float32, bfloat16 or float16, ValueError if it has fewer than two dimensions.
    """
    check_tensor(x, "x", INPUT_DTYPES)
    if x.dim() < 2:
        raise ValueError(f"quantize takes a matrix (M, K) or (…, K), not shape {tuple(x.shape)}; reshape it first")
    return x.flatten(0, -2)


def wanted_halves(*, rowwise: bool, columnwise: bool, method: str) -> tuple[Half, ...]:
    """The halves of the arguments of a method. Raises ValueError if both are False."""
    halves = tuple(half for half, wanted in zip(Half, (rowwise, columnwise), strict=True) if wanted)
    if not halves:
        raise ValueError(f"{method} takes rowwise=True, columnwise=True or both; both are False")
    return halves


def check_rotation(x: torch.Tensor, recipe: Recipe) -> Hadamard:
    """The transform of a recipe. Raises ValueError or TypeError for a recipe that cannot rotate `x` along K."""
    if recipe.transform is None:
        raise ValueError(f"recipe {recipe} has no transform; use nvfp4-rht, nvfp4-rht32 or another recipe with -rht")
    if x.dim() != 2:
        raise ValueError(f"recipe {recipe} rotates a matrix (M, K), not shape {tuple(x.shape)}; reshape it first")
    check_rotated(x, x.shape[1], recipe)
    return recipe.transform


def check_rotated(x: torch.Tensor, extent: int, recipe: Recipe) -> None:
    """Raises TypeError or ValueError if a recipe with a transform cannot rotate `extent` elements of `x`."""
    if recipe.transform is None:
        return
    if x.dtype != torch.bfloat16:
        raise TypeError(f"recipe {recipe} rotates bfloat16, not {dtype_name(x.dtype)}; convert it first")
    if extent % recipe.transform.group:
        raise ValueError(
            f"recipe {recipe} rotates whole groups of {recipe.transform.group}; {extent} elements of x "
            f"{tuple(x.shape)} are no multiple: pad x first"
        )


def check_rotated_sections(rows: Sequence[int], recipe: Recipe) -> None:
    """Raises ValueError if a recipe with a transform cannot rotate sections with these numbers of rows along M."""
    if recipe.transform is None:
        return
    group = recipe.transform.group
    if any(count % group for count in rows):
        raise ValueError(
            f"recipe {recipe} rotates whole groups of {group} rows; sections of {list(rows)} rows are no multiples: "
            "pad each section first"
        )


def check_random(random: object, shape: tuple[int, int], recipe: Recipe) -> None:
    """Raises ValueError or TypeError unless `random` fits the rounding of a matrix (M, K)."""
    if recipe.rounding != "stochastic":
        if random is not None:
            raise ValueError(f"recipe {recipe} rounds {recipe.rounding}; it takes no random bits")
    elif isinstance(random, torch.Tensor):
        check_tensor(random, "random", (torch.int32,), words_shape(shape))
    elif random is None:
        raise ValueError(
            f"recipe {recipe} rounds stochastically; give random=(seed, offset), or words, int32 {words_shape(shape)}"
        )
    elif not (isinstance(random, tuple) and len(random) == 2 and all(type(n) is int for n in random)):
        raise TypeError(f"random is a tensor of words or (seed, offset), not {random!r}")


def split_random(random: object) -> tuple[Random | None, Random | None]:
    """The random bits of the rowwise and of the columnwise half: the words of both halves, or (seed, offset).

    With (seed, offset) the columnwise half uses offset + 1. Raises TypeError for any other `random`.
    """
    if random is None:
        return None, None
    if isinstance(random, tuple) and len(random) == 2:
        first, second = random
        if type(first) is int and type(second) is int:
            return (first, second), (first, second + 1)
        if all(words is None or isinstance(words, torch.Tensor) for words in random):
            return first, second  # None: this half is not wanted
    raise TypeError(
        f"random of two halves is (seed, offset), or the words of the rowwise and the columnwise half, not "
        f"{type(random).__name__}"
    )


def check_random_of_sections(random: object, recipe: Recipe) -> None:
    """Raises ValueError or TypeError unless `random` fits the rounding of sections: seed and offset, no words.

    Philox numbers the blocks of all sections consecutively.
    """
    if recipe.rounding != "stochastic":
        check_random(random, (0, 0), recipe)
    elif random is None:
        raise ValueError(f"recipe {recipe} rounds stochastically; give sections random=(seed, offset)")
    elif isinstance(random, torch.Tensor):
        raise ValueError("sections take random=(seed, offset), not words")
    else:
        check_random(random, (0, 0), recipe)


def check_scale(scale: torch.Tensor | None, count: int, recipe: Recipe) -> None:
    """Raises ValueError or TypeError unless a recipe with given scales, and only such a recipe, gets `count` scales."""
    if (scale is None) == (recipe.tensor_scale == "given"):
        reason = f"takes scale, float32 ({count},)" if scale is None else "computes its own scales; omit scale"
        raise ValueError(f"recipe {recipe} {reason}")
    if scale is not None:
        check_tensor(scale, "scale", (torch.float32,), (count,))


def check_amax(amax: torch.Tensor | None, shape: Sequence[int], recipe: Recipe, name: str = "amax") -> None:
    """Raises ValueError or TypeError if a given amax is not float32 of `shape`, or the recipe has no tensor scale."""
    if amax is None:
        return
    if recipe.tensor_scale == "none":
        raise ValueError(f"recipe {recipe} has no tensor scale; it takes no amax")
    check_tensor(amax, name, (torch.float32,), shape)


def chosen_layout(scales: ScaleLayout, recipe: Recipe, *, swizzled: bool) -> ScaleLayout:
    """The layout of the arguments `scales` and `swizzled`, which is another word for the layout 128x4.

    Raises ValueError for an unknown layout, for another layout beside `swizzled`, and for a layout of bytes with a
    recipe that has float32 scales.
    """
    if scales not in LAYOUTS:
        raise ValueError(f"scales is {scales!r}; it can be {', '.join(map(repr, LAYOUTS))}")
    if swizzled and scales not in (LINEAR, TILES):
        raise ValueError(f"swizzled=True is the layout {TILES}, and scales is {scales!r}; omit swizzled=True")
    layout = TILES if swizzled else scales
    row = LAYOUTS[layout]
    if row.by_group or row.scale not in ("", recipe.scale.name):
        of = "the transpose of such scales: pack_scales packs them" if row.by_group else f"{row.scale} scales"
        raise ValueError(f"layout {layout} holds {of}; recipe {recipe} has rows of {recipe.scale.name} scales")
    if layout != LINEAR and recipe.scale is FP32:
        option = "swizzled=True" if swizzled else f"scales={layout!r}"
        raise ValueError(
            f"recipe {recipe} has float32 scales; the {layout.replace('x', '×')} layout holds bytes: omit {option}"
        )
    return layout


def check_packed_scales(scales: torch.Tensor, shape: tuple[int, int], layout: ScaleLayout = TILES) -> None:
    """Raises TypeError or ValueError unless `scales` are the uint8 codes of linear scales (R, C) in a layout."""
    check_tensor(scales, f"{layout} scales", (torch.uint8,), LAYOUTS[layout].packed_shape(shape))


def check_scales_matrix(scales: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless block scales are uint8 codes (R, C)."""
    check_tensor(scales, "scales", (torch.uint8,))
    if scales.dim() != 2:
        raise ValueError(f"scales are a matrix (M, ⌈K/block⌉), not shape {tuple(scales.shape)}")


def packing_of(
    shape: Sequence[int],
    layout: ScaleLayout | Layout,
    sections: torch.Tensor | None,
    packed: torch.Tensor | None = None,
) -> Packing:
    """The packing of linear scales of `shape`. `sections`: int64 (G,), rows of each section; waits for the device.

    Raises TypeError or ValueError for a shape or sections that the layout does not have, and for `packed` scales of
    another dtype or shape: uint8, or the type of the words of the layout.
    """
    if sections is not None:
        check_sizes(sections)
    packing = Packing(find_layout(layout), tuple(shape), None if sections is None else tuple(sections.tolist()))
    if packed is not None:
        check_tensor(packed, "packed scales", (torch.uint8,), packing.packed_shape)
    return packing


def check_scales_to_pack(scales: torch.Tensor, packing: Packing) -> None:
    """Raises TypeError or ValueError unless `scales` are bytes, or float32 powers of two for a layout of E8M0 scales.

    Waits for the device of float32 scales.
    """
    layout = packing.layout
    check_tensor(scales, "scales", (torch.uint8, *((torch.float32,) if layout.scale == "E8M0" else ())))
    if scales.dtype == torch.float32:
        wrong = scales.view(torch.int32).bitwise_and(SIGN_AND_MANTISSA) != 0
        if bool(wrong.any()):
            place = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"scales{place} is {float(scales[tuple(place)])}, no power of two; layout {layout.name} has exponents: "
                "round the scales to powers of two first"
            )


def check_out_dtype(dtype: torch.dtype, method: str) -> None:
    """Raises TypeError unless `dtype`, of the result of a method, is float32, bfloat16 or float16."""
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"{method} gives float32, bfloat16 or float16, not {dtype_name(dtype)}")


def check_history(history: torch.Tensor, scale: torch.Tensor, recipe: Recipe) -> Delayed:
    """The delayed scaling of a recipe. Raises ValueError or TypeError without delayed scaling, or if shapes differ."""
    if recipe.delayed is None:
        raise ValueError(f"recipe {recipe} takes no scale from a history; use fp8-delayed-e4m3 or fp8-delayed-e5m2")
    check_tensor(history, "history", (torch.float32,))
    check_tensor(scale, "scale", (torch.float32,))
    if history.dim() != 2 or not history.shape[0] or tuple(scale.shape) != (history.shape[1],):
        raise ValueError(
            f"history is (H, N), with at least one row, and scale (N,); these are {tuple(history.shape)} and "
            f"{tuple(scale.shape)}"
        )
    return recipe.delayed


def check_section_recipe(recipe: Recipe) -> None:
    """Raises ValueError for a recipe with an amax for every row: a section has a single amax."""
    if recipe.granularity == "row":
        raise ValueError(f"recipe {recipe} has an amax for every row; a section has a single amax")


def check_sizes(sizes: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless the sizes of sections are int64 (G,), G at least 1. Reads no values."""
    check_tensor(sizes, "sizes", (torch.int64,))
    if sizes.dim() != 1 or not len(sizes):
        raise ValueError(f"sizes of sections have shape (G,), G at least 1, not {tuple(sizes.shape)}")


def section_rows(sizes: torch.Tensor, total: int) -> list[int]:
    """The sizes of sections as a list; waits for the device. Raises ValueError unless the sum is `total` rows."""
    check_sizes(sizes)
    rows: list[int] = sizes.tolist()
    if min(rows) < 0 or sum(rows) != total:
        raise ValueError(
            f"sizes of sections are not negative and sum to the {total} rows of x; these are {rows}, sum {sum(rows)}"
        )
    return rows


def padded_rows(sizes: torch.Tensor, total: int, alignment: int) -> tuple[list[int], list[int]]:
    """The sizes of sections, and the sizes padded to multiples of `alignment`; waits for the device.

    Raises ValueError unless the padded sizes sum to `total` rows.
    """
    check_sizes(sizes)
    rows: list[int] = sizes.tolist()
    padded = [-(-count // alignment) * alignment for count in rows]
    if min(rows) < 0 or sum(padded) != total:
        raise ValueError(
            f"sizes of sections are not negative and, padded to multiples of {alignment}, sum to the {total} rows of "
            f"y; these are {rows}, padded {sum(padded)}"
        )
    return rows, padded


def check_rows(x: torch.Tensor, name: str) -> None:
    """Raises ValueError for a scalar."""
    if x.dim() < 1:
        raise ValueError(f"{name} has rows (M, …), not shape ()")


def check_pair(a: Recipe, b: Recipe) -> None:
    """Raises ValueError if operands of two recipes cannot be multiplied."""
    if reason := mismatch(a, b):
        raise ValueError(f"gemm cannot multiply {a} by {b}: {reason}")


def check_columns(a: Quantized, b: Quantized) -> None:
    """Raises ValueError unless the rows of two operands have the same number of elements."""
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"gemm multiplies (M, K) by (N, K): K is {a.shape[1]} in a {a.shape} and {b.shape[1]} in b {b.shape}"
        )


def check_sections_of_product(a: GroupedQuantized, b: Sequence[Quantized]) -> None:
    """Raises ValueError unless `b` has a matrix for every rowwise section of `a`, all of the same height."""
    if a.columnwise:
        raise ValueError("gemm_grouped multiplies sections that were quantized rowwise; these are columnwise")
    if len(a.sizes) != len(b) or not b:
        raise ValueError(
            f"gemm_grouped multiplies every section by its own matrix: {len(a.sizes)} sections, {len(b)} matrices in b"
        )
    for number, matrix in enumerate(b):
        if matrix.shape[1] != a.shape[1]:
            raise ValueError(
                f"gemm_grouped multiplies (M, K) by (N, K): K is {a.shape[1]} in a {a.shape} and {matrix.shape[1]} in "
                f"b[{number}] {matrix.shape}"
            )
    if any(matrix.shape[0] != b[0].shape[0] for matrix in b):
        heights = ", ".join(str(matrix.shape[0]) for matrix in b)
        raise ValueError(
            f"gemm_grouped has an output ({a.shape[0]}, N): all matrices of b have N rows, not {heights} rows"
        )


def check_epilogue(
    shape: tuple[int, int],
    out_dtype: torch.dtype,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    sections: int | None = None,
) -> None:
    """Raises TypeError or ValueError unless the dtype of the output (M, N), c (M, N) and bias (N,) fit together.

    The bias of a grouped GEMM with G = `sections` is (G, N).
    """
    check_out_dtype(out_dtype, "a GEMM")
    if c is not None:
        check_tensor(c, "c", INPUT_DTYPES, shape)
    if bias is not None:
        check_tensor(bias, "bias", INPUT_DTYPES, shape[1:] if sections is None else (sections, shape[1]))
