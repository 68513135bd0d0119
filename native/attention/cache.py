"""Paged caches of keys and values as kernels take them, by kernels/attention/cache.cuh, and their writes and reads."""

from __future__ import annotations

from typing import NamedTuple

import torch

from narrowgauge.native.quantize.quantize import quantize
from narrowgauge.native.runtime.arguments import blocks_for, suffix
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, Value
from narrowgauge.spec.arguments import check_tensor
from narrowgauge.spec.dtypes import INPUT_DTYPES
from narrowgauge.spec.formats import E2M1, E4M3, E8M0, FP32
from narrowgauge.spec.kv_cache import HALVES, PAGE_LAYOUTS, SCALES, Cache, PageLayoutName, part_name, slots_of
from narrowgauge.spec.recipes import WHOLE, Recipe, find_recipe

_WRITE = KernelStruct("attention/kv_write.cu", "KvWriteParameters")
_READ = KernelStruct("attention/kv_read.cu", "KvReadParameters")
_CHUNK, _THREADS = 16, 256
_READ_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Pages(NamedTuple):
    """Pages of keys, or of values."""

    codes: torch.Tensor
    """(pages, tokens of a page, heads, bytes), or (…, bytes/x, x); any strides."""
    scales: torch.Tensor | None
    """(pages, tokens of a page, heads, blocks), bytes or float32, any strides. None: the scale is given."""
    format: str
    """CacheFormat of the kernels."""
    swizzled: bool = False
    """Whether the scales of a head in a page lie in the order of the layout kv-v-swizzled."""

    @property
    def dim(self) -> int:
        """Elements of a head."""
        return self.codes[0, 0, 0].numel() * (2 if self.format == "CACHE_NVFP4" else 1)

    def fields(self) -> dict[str, Value]:
        """Fields of the struct CachePart."""
        page, offset, head, *inner = self.codes.stride()
        scale_strides = (0, 0, 0, 0) if self.scales is None else self.scales.stride()
        return {
            "codes": self.codes, "scales": self.scales, "format": self.format, "dim": self.dim,
            "page_size": self.codes.shape[1], "chunk": self.codes.shape[-1], "page": page, "offset": offset,
            "head": head, "chunk_stride": inner[0] if len(inner) > 1 else 0, "element": inner[-1],
            "scale_page": scale_strides[0], "scale_offset": scale_strides[1], "scale_head": scale_strides[2],
            "scale_block": scale_strides[3], "swizzled": self.swizzled,
        }  # fmt: skip


def pages_of(cache: Cache, recipe: Recipe, half: str) -> Pages:
    """Keys or values of a cache. Raises NotImplementedError for a recipe that the kernels do not read."""
    layout = PAGE_LAYOUTS[cache.layout]
    codes, scales = _logical(cache, half), getattr(cache, part_name(half, SCALES))
    return Pages(codes, None if scales is None else layout.logical(scales, part_name(half, SCALES)), _format(recipe))


def decode_scale(recipe: Recipe, scale: torch.Tensor | None) -> torch.Tensor | None:
    """The factor of elements times block scales, from the scale that a kernel is given."""
    return scale if scale is None or recipe.block_scale == "given" else 1 / scale


def kv_write(
    k: torch.Tensor, v: torch.Tensor, cache: Cache, slots: torch.Tensor, recipe: str | Recipe, *,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, page_layout: PageLayoutName = "nhd",
) -> Cache:  # fmt: skip
    """Quantizes keys and values (tokens, heads, columns), stores them in the slots of a cache, and returns the cache.

    `slots`: int64 (tokens,), page · (tokens of a page) + offset; a token of a negative slot is not stored. A recipe
    whose scale is given, of E4M3, takes one launch; every other one quantizes first. Raises TypeError or ValueError
    for tensors of another dtype or shape, NotImplementedError as `native.quantize`, ToolchainError if kernels cannot be
    compiled.
    """
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    tokens, heads, _ = k.shape
    check_tensor(k, "k", INPUT_DTYPES, tuple(k.shape))
    check_tensor(v, "v", (k.dtype,), (tokens, heads, v.shape[2]))
    check_tensor(slots, "slots", (torch.int64,), (tokens,))
    halves = dict(zip(HALVES, ((k, k_scale), (v, v_scale)), strict=True))
    if _fused(recipe):
        rows = {half: (x, scale, _logical(cache, half)) for half, (x, scale) in halves.items()}
        _launch_write(f"kv_write_{suffix(k.dtype)}", rows, slots.contiguous(), recipe)
        return cache
    layout = PAGE_LAYOUTS[cache.layout]
    codes: dict[str, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = {}
    scales: dict[str, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = {}
    for half, (x, scale) in halves.items():
        q = quantize(x.reshape(tokens * heads, x.shape[2]), recipe, scale=scale)
        codes[half] = q.codes.view(tokens, heads, -1), None, _logical(cache, half)
        stored = getattr(cache, part_name(half, SCALES))
        if stored is not None:
            target = layout.logical(stored, part_name(half, SCALES)).view(torch.uint8)
            scales[half] = q.scales.view(torch.uint8).view(tokens, heads, -1), None, target
    for parts in (codes, scales):
        if parts:
            _launch_write("kv_store", parts, slots.contiguous(), recipe)
    return cache


def kv_read(
    cache: Cache, pages: torch.Tensor, lengths: torch.Tensor, recipe: str | Recipe, *, dtype: str = "bfloat16",
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, page_layout: PageLayoutName = "nhd",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Keys and values (Σ lengths, heads, columns) of all requests, one request behind another.

    `pages`: (requests, most pages of a request), numbers of pages; `lengths`: (requests,). `dtype`: "bfloat16" or
    "float16". Raises NotImplementedError for a recipe that the kernels do not read, ToolchainError if kernels cannot be
    compiled.
    """
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    slots = slots_of(pages, lengths, cache.page)
    parts = [pages_of(cache, recipe, half) for half in HALVES]
    heads, of = parts[0].codes.shape[2], _READ_DTYPES[dtype]
    outs = [torch.empty(len(slots), heads, part.dim, dtype=of, device=slots.device) for part in parts]
    factors = [decode_scale(recipe, scale) for scale in (k_scale, v_scale)]
    fields = [
        {"source": part.fields(), "scale": factor, "out": out}
        for part, factor, out in zip(parts, factors, outs, strict=True)
    ]
    parameters = _READ(keys=fields[0], values=fields[1], slots=slots, tokens=len(slots), heads=heads,
                       scale_of_heads=_of_heads(k_scale))  # fmt: skip
    chunks = max(blocks_for(part.dim, _CHUNK) for part in parts)
    grid = blocks_for(len(slots) * heads * chunks, _THREADS), len(HALVES)
    launch("kv_read", f"kv_read_{suffix(of)}", grid, (_THREADS,), [parameters], device=slots.device)
    return outs[0], outs[1]


def _launch_write(
    kernel: str,
    parts: dict[str, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]],
    slots: torch.Tensor,
    recipe: Recipe,
) -> None:
    """Stores rows (tokens, heads, columns) of both halves, with their scales and the tensors of the cache."""
    fields: list[dict[str, Value]] = []
    longest = page = 0
    for x, scale, target in parts.values():
        if x.shape[2] != target[0, 0, 0].numel() or x.shape[1] != target.shape[2]:
            raise ValueError(f"rows of shape {tuple(x.shape)} are stored in a cache of {target.shape[2]} heads and "
                             f"{target[0, 0, 0].numel()} bytes of a row")  # fmt: skip
        part, page = Pages(target, None, "CACHE_FP8"), target.shape[1]
        fields.append({"rows": x, "token": x.stride(0), "head": x.stride(1), "column": x.stride(2), "scale": scale,
                       "target": part.fields()})  # fmt: skip
        longest = max(longest, blocks_for(x.shape[2], _CHUNK))
    x, scale, _ = next(iter(parts.values()))
    use = (
        "TIMES" if recipe.block_scale != "given" else "DIVIDE" if recipe.element_scale == "x/s" else "TIMES_RECIPROCAL"
    )
    tokens, heads, _ = x.shape
    parameters = _WRITE(keys=fields[0], values=fields[-1], slots=slots, tokens=tokens, heads=heads, chunks=longest,
                        scale_of_heads=_of_heads(scale), use=use)  # fmt: skip
    flags = (f"-DUSE={use}", f"-DHEADS={heads}u", f"-DCHUNKS={longest}u", f"-DPAGE_SIZE={page}")
    launch("kv_write", kernel, (blocks_for(tokens * heads * longest, _THREADS), len(parts)), (_THREADS,), [parameters],
           device=x.device, extra_flags=flags if x.device.type == "cuda" else ())  # fmt: skip


def _fused(recipe: Recipe) -> bool:
    return (
        recipe.element is E4M3 and recipe.tensor_scale == "given" and recipe.nan_code == E4M3.nan_code
        and recipe.rounding == "nearest-even" and recipe.negative_zero == "keep" and recipe.transform is None
    )  # fmt: skip


def _format(recipe: Recipe) -> str:
    if recipe.scale is FP32 and recipe.element is E4M3 and recipe.tensor_scale == "given":
        return "CACHE_FP8"
    if recipe.scale is FP32 and recipe.element is E4M3 and recipe.block[1] == WHOLE:
        return "CACHE_FP8_TOKEN"
    if recipe.scale is E4M3 and recipe.element is E2M1:
        return "CACHE_NVFP4"
    if recipe.scale is E8M0 and recipe.element is E4M3 and recipe.block == (1, 32):
        return "CACHE_MXFP8"
    raise NotImplementedError(f"kernels read caches of FP8, NVFP4 and MXFP8, not of {recipe}")


def _of_heads(scale: torch.Tensor | None) -> bool:
    return scale is not None and scale.numel() > 1


def _logical(cache: Cache, half: str) -> torch.Tensor:
    """A half of the cache as (pages, tokens of a page, heads, bytes), or (…, bytes/x, x): a view of its memory."""
    stored: torch.Tensor = getattr(cache, half)
    digits = [digit.partition(":")[0] for digit in getattr(PAGE_LAYOUTS[cache.layout], half).split()]
    return stored.permute([digits.index(digit) for digit in "nthdx" if digit in digits])
