"""The end of kernels that make a matrix row by row and quantize it: outputs, launches, and their recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

import torch

from narrowgauge.native.quantize.mx import scale_order as mx_scale_order
from narrowgauge.native.quantize.mx import up_from
from narrowgauge.native.quantize.nvfp4 import SCALE_ORDER as NVFP4_SCALE_ORDER
from narrowgauge.native.quantize.variants import unit_flags, variant_flags
from narrowgauge.native.runtime.arguments import blocks_for, check_contiguous, suffix, supported
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, Value, enumerators
from narrowgauge.spec.arguments import check_scale, chosen_layout
from narrowgauge.spec.formats import E4M3, E8M0, FP32
from narrowgauge.spec.quantized import Quantized, codes_shape, scales_shape
from narrowgauge.spec.recipes import WHOLE, Recipe, find_recipe
from narrowgauge.spec.scale_layouts import LINEAR, TILES, ScaleLayout

_HEADER = "fused/quantize_row.cuh"
_VARIANT = KernelStruct(_HEADER, "QuantizeRowVariant")
_CHUNK = 16
_BLOCKS = {E4M3: ((1, 16),), E8M0: ((1, 32),), FP32: ((1, 16), (1, 32), (1, 64), (1, 128), (1, WHOLE), (WHOLE, WHOLE))}
"""Format of the scale to the blocks of elements that share one: groups of lanes, a row, the tensor."""
_FAMILIES = {E4M3: "NVFP4", E8M0: "MX", FP32: "FP8"}
_THREADS, _WARP = 256, 32
_RESIDENT_THREADS = 1024
"""Threads of a multiprocessor for a kernel that loops over rows: it has up to 64 registers for each."""
LONGEST_ROW = 2**16
"""Columns of a row, at most: the threads of a block hold them in registers."""


@lru_cache(maxsize=256)
def row_recipe(name: str | Recipe) -> Recipe:
    """The recipe of a name. Raises ValueError for an unknown name, NotImplementedError for a recipe with stochastic
    rounding, a rotation, an amax for each row, 4over6, or blocks over several rows."""
    recipe = find_recipe(name) if isinstance(name, str) else name
    return supported(recipe, block=_BLOCKS.get(recipe.scale, ()), rounding=("nearest-even",), transform=(None,),
                     granularity=("tensor",), candidates=("6",))  # fmt: skip


def quantize_rows(
    source: str,
    struct: KernelStruct,
    fields: Mapping[str, Value],
    x: torch.Tensor,
    columns: int,
    recipe: Recipe,
    inputs: Sequence[torch.Tensor] = (),
    *,
    loops: bool,
    scale: torch.Tensor | None = None,
    scales: ScaleLayout = LINEAR,
    extra_flags: tuple[str, ...] = (),
) -> Quantized:
    """Run the kernel of `source` for the dtype of `x` (M, any), and quantize its rows of `columns` elements.

    `fields`: those of the kernel's `struct`, without `result`. `inputs`: the further matrices (M, K) and
    vectors (K,). `loops`: thread blocks of the kernel take whole
    rows, and loop over rows. `scale`, float32 (1,): the encode scale, for a recipe whose scale is given. `scales`: layout of the scales.
    A recipe with an amax of the tensor takes two launches. Raises NotImplementedError for rows longer than
    `LONGEST_ROW` and for a layout other than linear and 128x4, and as `check_scale`.
    """
    if columns > LONGEST_ROW:
        raise NotImplementedError(f"{source} has rows of up to {LONGEST_ROW} columns, and these have {columns}")
    layout = chosen_layout(scales, recipe, swizzled=False)
    if layout not in (LINEAR, TILES):
        raise NotImplementedError(f"{source} writes scales in layout {LINEAR} or {TILES}, not {layout}")
    check_scale(scale, 1, recipe)
    check_contiguous(scale=scale)
    rows, device = x.shape[0], x.device
    shape = (rows, columns)
    codes = torch.empty(codes_shape(shape, recipe), dtype=torch.uint8, device=device)
    new = torch.empty if layout == LINEAR else torch.zeros  # no thread writes the padding of a layout
    stored = torch.float32 if recipe.scale is FP32 else torch.uint8
    result = new(scales_shape(shape, recipe, layout=layout), dtype=stored, device=device)
    amax = encode = None
    if recipe.tensor_scale != "none":
        amax = torch.zeros(1, dtype=torch.float32, device=device)
        encode = torch.empty(1, dtype=torch.float32, device=device)
    whole = columns % _CHUNK == 0 and all(
        tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0 and (tensor.dim() == 1 or tensor.stride(0) % _CHUNK == 0)
        for tensor in (x, *inputs)
    )
    choices = _variant(recipe, swizzled=layout != LINEAR, whole_chunks=whole)
    grid, threads, chunks, segments = _grid(
        rows, columns, device, whole_rows=loops or choices["scope"] == "ROW", loops=loops
    )
    kernel = f"{source}_{suffix(x.dtype)}"
    flags = (f"-DELEMENT={recipe.element.name}", *variant_flags(_VARIANT, choices, device), *unit_flags(kernel, device),
             *extra_flags)  # fmt: skip
    if device.type == "cuda":
        flags += (f"-DCHUNKS={chunks}", f"-DROW_THREADS={threads}")

    common: dict[str, Value] = {
        "rows": rows, "columns": columns, "segments": segments, "variant": choices, "codes": codes, "scales": result, "amax": amax, "given": scale,
        "encode": encode, "largest_element": recipe.element.max, "smallest_amax": recipe.smallest_amax,
        "max_product": recipe.scale_max * recipe.element.max,
        "largest_scale": torch.finfo(x.dtype if recipe.largest_scale == "input" else torch.float32).max,
    }  # fmt: skip

    def run(**output: Value) -> None:
        parameters = struct(**fields, result={**common, **output})
        launch(source, kernel, (grid,), (threads,), (parameters,), device=device, extra_flags=flags)

    if recipe.tensor_scale == "max/amax":
        run(amax_alone=True, amax_out=amax)
    run(amax_alone=False, amax_out=amax if recipe.tensor_scale == "given" else None)
    return Quantized(codes, result, amax, recipe, shape, encode, layout)


def _variant(recipe: Recipe, *, swizzled: bool, whole_chunks: bool) -> dict[str, Value]:
    """Fields of the kernel's struct QuantizeRowVariant."""
    width = recipe.block[1]
    order = 0
    if recipe.scale is E8M0:
        order = enumerators(_HEADER, "MxScaleOrder")[mx_scale_order(recipe)]
    elif recipe.scale is E4M3:
        order = enumerators(_HEADER, "BlockScaleOrder")[NVFP4_SCALE_ORDER[recipe.block_scale]]
    return {
        "family": _FAMILIES[recipe.scale],
        "scope": "TENSOR" if recipe.whole else "ROW" if width == WHOLE else "GROUP",
        "lanes": 1 if width == WHOLE else width // _CHUNK, "scale_order": order,
        "up_from": up_from(recipe) if recipe.scale is E8M0 else 0,
        "power_of_two": recipe.scale_rounding == "down", "propagate_nan": recipe.nan == "propagate",
        "swizzled": swizzled, "whole_chunks": whole_chunks,
    }  # fmt: skip


def _grid(rows: int, columns: int, device: torch.device, *, whole_rows: bool, loops: bool) -> tuple[int, int, int, int]:
    """Thread blocks, threads of a block, chunks of a thread, and thread blocks of a row."""
    if device.type != "cuda":
        return max(rows, 1), _WARP, 0, 1
    chunks = blocks_for(columns, _CHUNK)
    segments = 1 if whole_rows else blocks_for(chunks, _THREADS)
    most = _THREADS if chunks <= 2 * _THREADS else 2 * _THREADS
    of_thread = blocks_for(chunks, most) if whole_rows else 1
    threads = blocks_for(blocks_for(chunks, segments * of_thread), _WARP) * _WARP
    blocks = max(rows, 1) * segments
    if loops:
        blocks = min(blocks, _multiprocessors(device) * max(1, _RESIDENT_THREADS // (threads * of_thread)))
    return blocks, threads, of_thread, segments


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
