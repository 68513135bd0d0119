"""Kernels of whole tiles of bfloat16, and of whole lines of codes: the reference's bytes, and their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.quantize import amax, dequantize, fp8, mx, nvfp4
from narrowgauge.native.runtime.launch import launch
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe
from tests.native.fp8 import NAMES as FP8_NAMES
from tests.native.quantize.test_mx import ELEMENTS, RULES
from tests.native.samples import DTYPES, FAMILIES, assert_both_same, assert_equal, matrix, options_of

BF16 = torch.bfloat16
SIDES = [(True, True), (True, False), (False, True)]
MX = (*(name for name in RULES if name.startswith("mxfp8-e4m3")), "mxfp8-e5m2", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp8-2d")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the launched kernels. FP8 uses the kernel of whole tiles, as on a GPU."""
    names: list[str] = []

    def noted(*given: Any, **options: Any) -> None:
        names.append(given[1])
        launch(*given, **options)

    def noted_with_flags(*given: Any, extra_flags: tuple[str, ...] = (), **options: Any) -> None:
        noted(*given, **options, extra_flags=(*extra_flags, "-O1"))  # compiled sooner

    monkeypatch.setitem(fp8._TILE_THREADS, "cpu", fp8._TILE_THREADS["cuda"])
    monkeypatch.setattr(fp8, "launch", noted_with_flags)
    for module in (mx, nvfp4, dequantize):
        monkeypatch.setattr(module, "launch", noted)
    return names


@pytest.mark.sampled(6)
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("name", MX)
def test_whole_tiles_have_the_references_mx(name: str, swizzled: bool, used: list[str]) -> None:
    for number, family in enumerate(FAMILIES):
        r = replace(find_recipe(name), nan=("ignore", "propagate")[number % 2])  # type: ignore[arg-type]
        for rowwise, columnwise in SIDES:
            x = matrix(family, 96, 256, BF16)
            options = {"rowwise": rowwise, "columnwise": columnwise, "swizzled": swizzled}
            assert_both_same(ops.quantize_both(x, r, **options), reference.quantize_both(x, r, **options))
    tiled = {"quantize_mx_tiles_bf16"}
    plain = set() if swizzled or r.block[0] > 1 else {"quantize_mx_plain_bf16"}
    assert set(used) == tiled | plain


@pytest.mark.long
@pytest.mark.parametrize("name", ["mxfp8-e4m3", "mxfp8-2d"])
def test_tiles_in_the_shape_of_a_gpu_have_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a thread holds all rows of a tile."""
    monkeypatch.setitem(mx._TILE_THREADS, "cpu", mx._TILE_THREADS["cuda"])

    def as_on_a_gpu(*given: Any, extra_flags: tuple[str, ...], **options: Any) -> None:
        launch(*given, **options, extra_flags=(*extra_flags, "-DMX_PIECE_ROWS=8", "-O1"))

    monkeypatch.setattr(mx, "launch", as_on_a_gpu)
    for family in FAMILIES:
        x = matrix(family, 64, 256, BF16)
        assert_both_same(ops.quantize_both(x, name), reference.quantize_both(x, name))


@pytest.mark.long
@pytest.mark.parametrize("name", FP8_NAMES)
def test_whole_tiles_have_the_references_fp8(name: str, used: list[str]) -> None:
    for number, family in enumerate(FAMILIES):
        r = replace(find_recipe(name), nan=("ignore", "propagate")[number % 2])  # type: ignore[arg-type]
        x = matrix(family, 256, 384, BF16)
        for rowwise, columnwise in SIDES:
            options = {"rowwise": rowwise, "columnwise": columnwise, **options_of(r)}
            assert_both_same(ops.quantize_both(x, r, **options), reference.quantize_both(x, r, **options))
    assert set(used) == {"quantize_fp8_tiles_bf16"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(128, 33 * 128), (384, 128)])
def test_scales_by_tile_are_stored_in_order(
    shape: tuple[int, int], used: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a large matrix. A thread block stores 32 scales of a row."""
    monkeypatch.setattr(fp8, "_SCALES_BY_TILE", 1)
    monkeypatch.setattr("narrowgauge.native.quantize.amax._SMALL", 2**20)
    x = matrix("outliers", *shape, BF16)
    assert_both_same(ops.quantize_both(x, "fp8-block-1x128"), reference.quantize_both(x, "fp8-block-1x128"))
    assert used == ["quantize_fp8_tiles_bf16", "store_scales"]


def others() -> Iterator[torch.Tensor]:
    """Matrices of other shapes, dtypes, strides or alignment than whole tiles of bfloat16."""
    yield from (matrix("outliers", rows, columns, BF16) for rows, columns in ((129, 128), (128, 160), (0, 128)))
    yield from (matrix("outliers", 128, 128, dtype) for dtype in DTYPES if dtype != BF16)
    yield matrix("outliers", 128, 256, BF16)[:, ::2]
    moved = torch.empty(128 * 128 + 1, dtype=BF16)[1:].view(128, 128)
    moved.copy_(matrix("outliers", 128, 128, BF16))
    yield moved


@pytest.mark.parametrize("name", ["mxfp8-e4m3", "fp8-block-1x128", "fp8-current"])
def test_other_matrices_use_the_general_kernels(name: str, used: list[str]) -> None:
    for x in others():
        assert_both_same(ops.quantize_both(x, name), reference.quantize_both(x, name))
    assert used
    assert not any("tiles" in kernel for kernel in used)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d", "nvfp4-rht-sr", "nvfp4-rowscaled", "nvfp4-4over6-448-mae"])
def test_a_block_of_threads_takes_many_tiles(
    name: str, swizzled: bool, used: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of large matrices: eight, then two, and last of all one."""
    monkeypatch.setattr(amax, "_FEWEST", 1)
    monkeypatch.setattr(amax, "_SMALL", 2**20)
    options: dict[str, Any] = {"swizzled": swizzled, "random": (7, 1) if name.endswith("sr") else None}
    for strips in (24, 29):
        x = matrix("outliers", 64 * strips, 128, BF16)
        assert_both_same(ops.quantize_both(x, name, **options), reference.quantize_both(x, name, **options))
    assert set(used) == {"quantize_nvfp4_tiles_bf16"}


def test_large_matrices_on_a_cpu_use_the_general_kernels(used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The general kernels are faster on a CPU."""
    monkeypatch.setattr(amax, "_SMALL", 64 * 128)
    for rows in (64, 128):
        for name in ("nvfp4-2d", "nvfp4-rht", "mxfp8-2d"):
            x = matrix("outliers", rows, 128, BF16)
            assert_both_same(ops.quantize_both(x, name), reference.quantize_both(x, name))
    tiled = ["quantize_nvfp4_tiles_bf16", "quantize_nvfp4_tiles_bf16", "quantize_mx_tiles_bf16"]
    assert used == [*tiled, "quantize_nvfp4_bf16", "quantize_nvfp4_bf16", "quantize_mx_bf16"]


# Whole lines of codes.


@pytest.mark.sampled(10)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", [*ELEMENTS, "mxfp8-2d", "nvfp4", "nvfp4-2d", "nvfp4-rowscaled", "fp8-block-1x128-e5m2",
                                  "fp8-current"])  # fmt: skip
def test_whole_lines_have_the_references_values(name: str, dtype: torch.dtype, used: list[str]) -> None:
    for family in FAMILIES:
        q = reference.quantize(matrix(family, 67, 384, BF16), name)
        assert_equal(ops.dequantize(q, dtype), reference.dequantize(q, dtype))
    kind = "rows" if find_recipe(name).granularity == "row" else "lines"
    assert set(used) == {f"dequantize_{kind}_{suffix(dtype)}"}


def suffix(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", BF16: "bf16", torch.float16: "fp16"}[dtype]


def test_transposed_or_unaligned_codes_use_the_general_kernel(used: list[str]) -> None:
    q = reference.quantize(matrix("outliers", 64, 64, BF16), "mxfp8-e4m3")
    turned = replace(q, codes=q.codes.T.contiguous(), scales=q.scales.T.contiguous(), transposed=True)
    moved = torch.empty(64 * 64 + 1, dtype=torch.uint8)[1:].view(64, 64)
    moved.copy_(q.codes)
    for other in (turned, replace(q, codes=moved)):
        assert_equal(ops.dequantize(other), reference.dequantize(q))
    assert used == ["dequantize_fp32"] * 2
