"""Kernels that write and read caches: judged by the contracts, with every recipe and page layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.operations.contracts.inputs import contract_inputs
from narrowgauge.native import ops as native
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.spec.kv_cache import PAGE_LAYOUTS, Cache, PageLayoutName
from narrowgauge.spec.recipes import find_recipe
from tests.harness.operations.contracts.cache.kernels import Kernels
from tests.harness.operations.contracts.cache.test_sound import NVFP4, RECIPES, SIZES, cache_of, program, stored
from tests.native.devices import ON_EVERY_DEVICE
from tests.native.gpu import needs_gpu

FP8 = "fp8-static-e4m3@vllm-kv"
CASES = [
    (recipe, layout)
    for recipe in RECIPES
    for layout in PAGE_LAYOUTS
    if (layout == "nvfp4-page") <= (recipe == NVFP4) and (layout == "x-packed") <= ("static" in recipe)
]


class Native(Kernels):
    """The kernels on a device, for tensors on the CPU. Slots, tables of pages and lengths have strides."""

    def __init__(self, device: str) -> None:
        self.device = device

    def on_device(self, cache: Cache) -> Cache:
        parts = {name: part.to(self.device) for name, part in cache.parts().items()}
        scales = parts.get("key_scales"), parts.get("value_scales")
        return Cache(parts["keys"], parts["values"], *scales, cache.recipe, cache.layout, cache.page)

    def kv_write(self, k: Any, v: Any, cache: Cache, slots: Any, recipe: Any, **scales: Any) -> Cache:
        held = self.on_device(cache)
        k, v, slots = (tensor.to(self.device) for tensor in (k, v, slots.repeat_interleave(2)[::2]))
        native.kv_write(k, v, held, slots, recipe, **{name: scale.to(self.device) for name, scale in scales.items()})
        for name, part in cache.parts().items():
            part.copy_(held.parts()[name])
        return cache

    def kv_read(self, cache: Cache, pages: Any, lengths: Any, recipe: Any, **options: Any) -> tuple[Any, ...]:
        moved = {name: o.to(self.device) if isinstance(o, torch.Tensor) else o for name, o in options.items()}
        table, lengths = pages.repeat_interleave(2, 1)[:, ::2], lengths.repeat_interleave(2)[::2]
        held = self.on_device(cache)
        found = native.kv_read(held, table.to(self.device), lengths.to(self.device), recipe, **moved)
        return tuple(tensor.cpu() for tensor in found)


def sizes_of(recipe: str, layout: PageLayoutName) -> dict[str, int]:
    """Sizes with a scale for each head, or with a part of a chunk of 16 elements, or with a page of whole words."""
    two_levels = {"v_dim": 128, "page": 8} if recipe == NVFP4 else {}
    uneven = {"dim": 48, "v_dim": 80} if "static" in recipe and layout == "hnd" else {}
    return {**SIZES, "scales": 3 if layout == "hnd" else 1, **uneven, **two_levels}


@pytest.mark.sampled(3)
@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_written_rows(recipe: str, layout: PageLayoutName, dtype: str, device: str) -> None:
    steps = program("kv-write", recipe, dtype)
    for family in ("normal", "position"):
        tensors = contract_inputs(steps, sizes_of(recipe, layout), family, Draw("written"))
        found = stored(steps, tensors, Native(device), layout)
        assert not [name for name, part in judged(steps, tensors, found) if bool(part.wrong.any())], family


@ON_EVERY_DEVICE
@pytest.mark.parametrize("recipe", ["int8-row", "int8-row@vllm-row", "fp8-row-e4m3@vllm-kv", NVFP4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_special_rows(recipe: str, dtype: str, device: str) -> None:
    """Rows of zeros, NaN, infinity, the smallest numbers, and whole numbers and halves under a scale of 1."""
    steps = program("kv-write", recipe, dtype)
    tensors = contract_inputs(steps, SIZES, "normal", Draw("special"))
    for name in ("k", "v"):
        rows = tensors[name]
        rows[0], rows[1, 3], rows[2, 5], rows[3, 1], rows[4] = 0.0, float("nan"), float("inf"), -float("inf"), 1e-45
        rows[5] = torch.arange(len(rows[5])) / 2
        rows[5, 0] = -127.0
        rows[6] = torch.finfo(rows.dtype).tiny
    found = stored(steps, tensors, Native(device), "nhd")
    assert not [name for name, part in judged(steps, tensors, found) if bool(part.wrong.any())]


@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_read_rows(recipe: str, layout: PageLayoutName, dtype: str, device: str) -> None:
    steps = program("kv-read", recipe)
    tensors = contract_inputs(steps, sizes_of(recipe, layout), "normal", Draw("read"))
    cache = cache_of(tensors, recipe, layout)
    given = {name: tensors[name] for name in ("k_scale", "v_scale") if name in tensors}
    arguments = cache, tensors["pages"], tensors["lengths"], find_recipe(recipe)
    right = Kernels().kv_read(*arguments, dtype=dtype, **given)
    for one, other in zip(Native(device).kv_read(*arguments, dtype=dtype, **given), right, strict=True):
        assert torch.equal(one.float().nan_to_num(7.0), other.float().nan_to_num(7.0))


@ON_EVERY_DEVICE
def test_every_number_under_many_scales(device: str) -> None:
    """The quotient x/s is rounded once: all 16-bit numbers, scales of many exponents, also far ones."""
    recipe, draw = find_recipe(FP8), torch.Generator().manual_seed(0)
    exponents = [*range(-45, 46, 5), *[0] * 20]
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 1, 16)
        for exponent in exponents:
            scale = torch.ldexp(1 + torch.rand(1, generator=draw), torch.tensor(exponent))
            if (
                exponent == 5
            ):  # all bits of the mantissa: 2^-5/s lies above a tie of float32 between 0 and the least code
                scale = torch.nextafter(torch.ldexp(torch.ones(1), torch.tensor(exponent)), torch.zeros(1))
            cells = torch.zeros(len(x) // 16, 16, 1, 16, dtype=torch.uint8)
            cache = Cache(cells, cells.clone(), None, None, recipe, "nhd", 16)
            Native(device).kv_write(x, x, cache, torch.arange(len(x)), recipe, k_scale=scale, v_scale=scale)
            quotient = x.float() / scale
            right = quotient.clamp(-448, 448).to(torch.float8_e4m3fn).float()
            for half in (cache.keys, cache.values):
                found = half.view(torch.float8_e4m3fn).view(x.shape).float()
                assert torch.equal(found.nan_to_num(500.0), right.nan_to_num(500.0)), exponent
                assert torch.equal(found.signbit() & (found == 0), right.signbit() & (right == 0)), exponent


@needs_gpu
@pytest.mark.long
def test_slots_beyond_int32() -> None:
    """Rows in the first and in the last pages of a cache of more than 2^31 bytes of keys and of values, 5 GB."""
    recipe, page, heads, dim = find_recipe(FP8), 16, 8, 128
    count = 2**31 // (page * heads * dim) + 3
    cells = [torch.full((count, page, heads, dim), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(2)]
    cache, scale = Cache(cells[0], cells[1], None, None, recipe, "nhd", page), torch.ones(1, device="cuda")
    used = torch.tensor([0, count - 1, count - 2], device="cuda")
    slots = (used.unsqueeze(1) * page + torch.arange(page, device="cuda")).flatten()
    k, v = torch.randn(2, len(slots), heads, dim, device="cuda").bfloat16()
    native.kv_write(k, v, cache, slots, recipe, k_scale=scale, v_scale=scale)
    lengths = torch.tensor([len(slots)], device="cuda")
    found = native.kv_read(cache, used.view(1, -1), lengths, recipe, k_scale=scale, v_scale=scale)
    for half, rows, read in zip(cells, (k, v), found, strict=True):
        right = rows.to(torch.float8_e4m3fn)
        assert torch.equal(half[used].flatten(0, 1), right.view(torch.uint8))
        assert torch.equal(read, right.bfloat16())
        assert all(bool((part == 0x5A).all()) for part in half[1 : count - 2].split(1 << 14))


def test_rows_of_another_width_are_refused() -> None:
    recipe = find_recipe(FP8)
    cells = torch.zeros(2, 4, 1, 16, dtype=torch.uint8)
    x, scale = torch.zeros(3, 1, 32, dtype=torch.bfloat16), torch.ones(1)
    with pytest.raises(ValueError, match="16 bytes of a row"):
        native.kv_write(
            x, x, Cache(cells, cells.clone(), None, None, recipe, "nhd", 4), torch.arange(3), recipe, k_scale=scale,
            v_scale=scale,
        )  # fmt: skip
