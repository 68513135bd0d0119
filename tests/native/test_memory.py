"""No operation reads outside its inputs or writes outside its outputs: docs/tolerance.md#memory-and-repetition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from narrowgauge.native.gemm import paths
from narrowgauge.native.gemm import skinny as gemm_skinny
from narrowgauge.native.gemm.operands import product_family
from narrowgauge.reference import ops as reference
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.quantize import sections as sections_reference
from narrowgauge.spec.recipes import find_recipe
from tests.native import declared, fp8, skinny, tensor_cores
from tests.native.devices import ON_CPU_AND_HOPPER, ON_EVERY_DEVICE, converted, ops
from tests.native.fp8 import threads
from tests.native.gemm.test_gemm_skinny import E4M3
from tests.native.gemm.test_gemm_skinny import operands as skinny_operands
from tests.native.gemm.test_gemm_wgmma_fp8 import PAIRS as WGMMA_PAIRS
from tests.native.guards import embedded, guarded_outputs
from tests.native.operands import NVFP4_PAIRS, PAIRS, random_operand, random_sections, stored_transposed
from tests.native.quantize.test_delayed import histories, scales_for
from tests.native.samples import (
    DTYPES,
    assert_both_same,
    assert_equal,
    assert_same,
    assert_sections_same,
    matrix,
    options_of,
    sample,
    words_for,
)

__all__ = ["threads"]

QUANTIZED = (
    "nvfp4", "nvfp4-2d", "nvfp4-sr", "nvfp4-rht", "nvfp4-rowscaled", "nvfp4-2d-4over6-448-mae", "mxfp8-e4m3",
    "mxfp6-e2m3-2d", "mxfp4", "mxfp8-e5m2-sr", "mxfp4-2d-sr", *fp8.KINDS,
)  # fmt: skip
Guarded = Callable[..., Any]


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Guarded:
    """Calls a function with guard zones around its inputs and outputs. Checks the zones, and that inputs stay."""

    def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        inputs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def embed(x: torch.Tensor) -> torch.Tensor:
            inputs.append((x, embedded(x) if x.is_contiguous() else x))
            return inputs[-1][1]

        moved, named = converted(arguments, embed), converted(options, embed)
        with guarded_outputs(monkeypatch):
            result = function(*moved, **named)
        for before, after in inputs:
            copies = (part.clone(memory_format=torch.contiguous_format) for part in (before, after))
            assert torch.equal(*(copy.view(torch.uint8) for copy in copies))
        return result

    return call


def sparse(x: torch.Tensor) -> torch.Tensor:
    """`x` as every second row and third column of a matrix of 0xFF bytes, which are NaN."""
    poison = torch.full((2 * x.shape[0], 3 * x.shape[1] * x.itemsize), 0xFF, dtype=torch.uint8)
    return poison.view(x.dtype)[::2, ::3].copy_(x)


LAYOUTS = (lambda x: x, lambda x: embedded(x.T.contiguous()).T, sparse)


# Quantization. A NaN propagates, so that a single NaN from outside changes the result.


@pytest.mark.sampled(14)
@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("shape", [(1, 1), (17, 31), (65, 33), (128, 64), (256, 128)], ids=str)
def test_quantize(name: str, shape: tuple[int, int], guarded: Guarded) -> None:
    recipe = replace(find_recipe(name), nan="propagate")
    for dtype, layout, swizzled in product(DTYPES[:2], LAYOUTS, (False, True)):
        if (recipe.transform is not None and dtype != torch.bfloat16) or (swizzled and name in fp8.KINDS):
            continue
        plain = sample(recipe, "outliers", *shape, dtype)
        options = {**options_of(recipe), **({"swizzled": True} if swizzled else {})}
        expected = reference.quantize_both(plain, recipe, **options)
        x = layout(plain)
        assert_both_same(guarded(ops.quantize_both, x, recipe, **options), expected)
        column = guarded(ops.quantize_both, x, recipe, rowwise=False, **options)
        assert_both_same(column, (None, expected[1]))
        alone = reference.quantize(plain, recipe, **options)
        assert_same(guarded(ops.quantize, x, recipe, **options), alone)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8-e5m2", "mxfp6-e3m2", "mxfp4"])
def test_plain_kernels(name: str, dtype: torch.dtype, guarded: Guarded) -> None:
    """Kernels of contiguous matrices."""
    recipe = replace(find_recipe(name), nan="propagate")
    for columns in (1, 16, 17, 31, 32, 33, 64, 77):
        x = matrix("outliers", 19, columns, dtype)
        assert_same(guarded(ops.quantize, x, recipe), reference.quantize(x, recipe))


@pytest.mark.parametrize("name", fp8.KINDS)
def test_fp8_in_the_shape_of_a_gpu(name: str, threads: int, guarded: Guarded) -> None:
    recipe = replace(find_recipe(name), nan="propagate")
    for rows, columns, layout in ((130, 140, LAYOUTS[0]), (17, 31, LAYOUTS[2]), (256, 128, LAYOUTS[0])):
        plain = matrix("outliers", rows, columns, torch.bfloat16)
        got = guarded(ops.quantize_both, layout(plain), recipe, **options_of(recipe))
        assert_both_same(got, reference.quantize_both(plain, recipe, **options_of(recipe)))


@ON_EVERY_DEVICE
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (17, 31), (65, 33)])
def test_amaxes_and_random_words(rows: int, columns: int, guarded: Guarded) -> None:
    x = matrix("outliers", rows, columns, torch.float32)
    words, one = (words_for(rows, columns), words_for(columns, rows)), (torch.tensor([3.0]), torch.tensor([2.0]))
    each = (torch.linspace(0.5, 3, rows), torch.linspace(0.5, 3, columns))
    for name, options in {
        "nvfp4-sr": {"amax": one, "random": words},
        "nvfp4-rowscaled": {"amax": each},
        "fp8-current-e4m3": {"amax": one},
    }.items():
        got = guarded(ops.quantize_both, x, name, **options)
        assert_both_same(got, reference.quantize_both(x, name, **options))


@pytest.mark.sampled(2)
@ON_EVERY_DEVICE
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-sr", "mxfp4", "mxfp8-2d-sr", *fp8.KINDS])
def test_quantize_grouped(name: str, columnwise: bool, guarded: Guarded) -> None:
    recipe, sizes = replace(find_recipe(name), nan="propagate"), torch.tensor([17, 0, 130, 1, 52])
    options = {"columnwise": columnwise, **options_of(recipe, len(sizes))}
    amax = torch.tensor([3.0, 1.0, 2.0, 5.0, 0.1])
    for columns, given in product((1, 17, 64, 140), ({}, {"amax": amax}) if name.startswith("nvfp4") else ({},)):
        x = matrix("outliers", 200, columns, torch.float32)
        got = guarded(ops.quantize_grouped, x, sizes, recipe, **options, **given)
        assert_sections_same(got, reference.quantize_grouped(x, sizes, recipe, **options, **given))


# Other operations of quantized matrices.


@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("columns", [1, 16, 17, 31, 77])
def test_dequantize(columns: int, dtype: torch.dtype, guarded: Guarded) -> None:
    for name in ("nvfp4", "mxfp4", "mxfp8-e4m3", "fp8-block-128x128", "fp8-current-e5m2"):
        for q in reference.quantize_both(matrix("outliers", 19, columns, torch.float32), name):
            assert q is not None
            q.tensor_scale = None
            assert_equal(guarded(ops.dequantize, q, dtype), reference.dequantize(q, dtype), name)


@ON_EVERY_DEVICE
def test_transform_swizzle_update_and_pad(guarded: Guarded) -> None:
    for group in (2, 16, 128):
        recipe, x = find_recipe("nvfp4-rht" + str(group).replace("16", "")), matrix("normal", 9, 384, torch.bfloat16)
        assert_equal(guarded(ops.transform, x, recipe), reference.transform(x, recipe))
    for rows, columns in ((1, 1), (129, 5), (128, 4)):
        scales = torch.arange(rows * columns).view(rows, columns).byte()
        swizzled = guarded(ops.swizzle, scales)
        assert_equal(swizzled, reference.swizzle(scales))
        assert_equal(guarded(ops.unswizzle, swizzled, (rows, columns)), scales)
    for length, tensors in ((1, 1), (5, 33), (17, 31)):
        given = (histories(length, tensors), scales_for(tensors, (1.0, 2.0)), "fp8-delayed-e5m2")
        for got, expected in zip(guarded(ops.update_scale, *given), reference.update_scale(*given), strict=True):
            assert_equal(got, expected)
    for width, dtype in product((1, 16, 33), (torch.bfloat16, torch.int64)):
        x, sizes = matrix("normal", 160, width, torch.float32).to(dtype), torch.tensor([0, 129, 31, 0])
        padded, _ = guarded(ops.pad_sections, x, sizes, "nvfp4")
        assert_equal(padded, sections_reference.pad_sections(x, sizes, "nvfp4")[0])
        assert_equal(guarded(ops.unpad_sections, padded, sizes, "nvfp4"), x)


# Products.


@ON_EVERY_DEVICE
@pytest.mark.parametrize("out_dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 9, 31), (65, 66, 130)])
def test_gemm(m: int, n: int, k: int, out_dtype: torch.dtype, guarded: Guarded) -> None:
    c, bias = matrix("normal", m, n, out_dtype), matrix("normal", 1, n, out_dtype).view(n)
    pairs = (*NVFP4_PAIRS, *PAIRS[:: 1 + (m > 9)])
    products = [(random_operand(left, m, k, 1), random_operand(right, n, k, 2)) for left, right in pairs]
    products.append(tuple(map(stored_transposed, products[len(NVFP4_PAIRS)])))
    for a, b in products:
        y = guarded(ops.gemm, a, b, out_dtype=out_dtype, c=c, bias=bias)
        assert_equal(y, declared.gemm(a, b, out_dtype=out_dtype, c=c, bias=bias))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("sizes", [[1], [7, 0, 60]], ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8-e4m3", "fp8-current-e4m3"])
def test_gemm_grouped(name: str, sizes: list[int], guarded: Guarded) -> None:
    for (n, k), dtype in product(((1, 1), (66, 31)), DTYPES):
        a, b = random_sections(name, sizes, k), [random_operand(name, n, k, seed) for seed in range(len(sizes))]
        c, bias = matrix("normal", sum(sizes), n, dtype), matrix("normal", len(sizes), n, dtype)
        y = guarded(ops.gemm_grouped, a, b, out_dtype=dtype, c=c, bias=bias)
        assert_equal(y, declared.gemm_grouped(a, b, out_dtype=dtype, c=c, bias=bias))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", ["mxfp8-e4m3", "mxfp4", "mxfp6-e2m3-2d", "fp8-block-128x128", "fp8-delayed-e4m3"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 9, 31), (129, 131, 70)])
def test_gemm_quantized(name: str, m: int, n: int, k: int, guarded: Guarded) -> None:
    a, b = random_operand("mxfp8-e4m3", m, k, 1), random_operand("mxfp6-e3m2", n, k, 2)
    c, bias = matrix("normal", m, n, torch.bfloat16), matrix("normal", 1, n, torch.float32).view(n)
    options = {"out_dtype": torch.float32, "c": c, "bias": bias}
    got = guarded(ops.gemm_quantized, a, b, name, **options, **options_of(find_recipe(name)))
    assert_same(got, reference.quantize(declared.gemm(a, b, **options), name, **options_of(find_recipe(name))))


@ON_CPU_AND_HOPPER
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (7, 9, 31), pytest.param(131, 130, 130, marks=pytest.mark.long), (5, 264, 64)]
)
def test_tensor_cores(m: int, n: int, k: int, guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    for left, right in tensor_cores.PAIRS:
        a, b = random_operand(left, m, k, 1), random_operand(right, n, k, 2)
        with tensor_cores.on_tensor_cores(monkeypatch):
            y = guarded(ops.gemm, a, b, out_dtype=torch.bfloat16)
        assert_equal(y, bounds(a, b, out_dtype=torch.bfloat16, order=tensor_cores.ORDER).expected)


@pytest.mark.sampled(2)
@ON_CPU_AND_HOPPER
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 16), (131, 136, 144), (5, 264, 48)])
def test_fp8_tensor_cores(m: int, n: int, k: int, guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowgauge.native.gemm.gemm.path_of", lambda *_, **__: paths.FP8)
    for left, right in WGMMA_PAIRS[::3]:
        a, b = random_operand(left, m, k, 1), random_operand(right, n, k, 2)
        y = guarded(ops.gemm, a, b, out_dtype=torch.bfloat16)
        order = paths.order_of(paths.FP8, product_family(a.recipe, b.recipe))
        assert_equal(y, bounds(a, b, out_dtype=torch.bfloat16, order=order).expected)


@ON_CPU_AND_HOPPER
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8-e4m3"])
@pytest.mark.parametrize(("m", "n", "k"), [(5, 7, 1024), pytest.param(70, 133, 1536, marks=pytest.mark.long)])
def test_fused_decoding(name: str, m: int, n: int, k: int, guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = random_operand(name, m, k, 1), random_operand(name, n, k, 2)
    b.scales[3, 2] = 0xF0  # MX: outside the range of tiles, so that codes are read once more
    with monkeypatch.context() as patch:
        patch.setattr("narrowgauge.native.gemm.gemm.path_of", lambda *_, **__: paths.FUSED)
        y = guarded(ops.gemm, a, b, out_dtype=torch.bfloat16)
        order = ops.gemm_order(a, b)
    portable = ops.gemm(a, b, out_dtype=torch.bfloat16)
    refused = name == "mxfp8-e4m3"
    assert_equal(y, portable if refused else bounds(a, b, out_dtype=torch.bfloat16, order=order).expected)


@pytest.mark.sampled(7)
@ON_EVERY_DEVICE
@pytest.mark.parametrize(
    ("name", "wide", "n", "k"),
    [*((name, False, 35, 512) for name in ("nvfp4", *E4M3)), ("nvfp4", True, 67, 512), ("nvfp4", True, 5, 2560)],
)
def test_few_rows(name: str, wide: bool, n: int, k: int, guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_skinny, "wide", lambda *_: wide)
    a, b = skinny_operands(name, 5, n, k)
    assert_equal(guarded(skinny.product, a, b, out_dtype=torch.float32), skinny.gemm(a, b, out_dtype=torch.float32))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("sizes", [[5, -3, 1000], [20, 20, 20], [-1, torch.iinfo(torch.int64).max, 1]], ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8-e4m3", "fp8-block-128x128-e4m3"])
def test_wrong_sizes_of_a_product_are_cut(name: str, sizes: list[int], guarded: Guarded) -> None:
    """The host does not see sizes on a GPU: sections end with the 20 rows of a."""
    a = random_sections(name, [5, 0, 15], 150)
    b = [random_operand(name.replace("128x128", "1x128"), 33, 150, seed) for seed in range(3)]
    y = guarded(ops.gemm_grouped, replace(a, sizes=torch.tensor(sizes)), b, out_dtype=torch.float32)
    cut, left = [], 20
    for size in sizes:
        cut.append(min(max(size, 0), left))
        left -= cut[-1]
    if "128x128" not in name:  # scales of whole blocks belong to the sections of `a`
        assert_equal(y, declared.gemm_grouped(replace(a, sizes=torch.tensor(cut)), b, out_dtype=torch.float32))
