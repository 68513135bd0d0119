"""No operation reads outside its inputs or writes outside its outputs: docs/tolerance.md#memory-and-repetition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowgauge.native.gemm import paths
from narrowgauge.native.gemm import skinny as gemm_skinny
from narrowgauge.native.gemm.operands import product_family
from narrowgauge.reference import ops as reference
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.spec.recipes import find_recipe
from tests.native import declared, fp8, skinny, tensor_cores
from tests.native.devices import ON_CPU_AND_HOPPER, ON_EVERY_DEVICE, converted, ops
from tests.native.fp8 import threads
from tests.native.gemm.test_gemm_skinny import E4M3
from tests.native.gemm.test_gemm_skinny import operands as skinny_operands
from tests.native.gemm.test_gemm_wgmma_fp8 import PAIRS as WGMMA_PAIRS
from tests.native.guards import embedded, guarded_outputs
from tests.native.operands import random_operand, random_sections
from tests.native.samples import (
    assert_both_same,
    assert_equal,
    matrix,
    options_of,
)

__all__ = ["threads"]

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


# Quantization. A NaN propagates: a single NaN from outside changes the result.


@pytest.mark.parametrize("name", fp8.KINDS)
def test_fp8_in_the_shape_of_a_gpu(name: str, threads: int, guarded: Guarded) -> None:
    recipe = replace(find_recipe(name), nan="propagate")
    for rows, columns, layout in ((130, 140, LAYOUTS[0]), (17, 31, LAYOUTS[2]), (256, 128, LAYOUTS[0])):
        plain = matrix("outliers", rows, columns, torch.bfloat16)
        got = guarded(ops.quantize_both, layout(plain), recipe, **options_of(recipe))
        assert_both_same(got, reference.quantize_both(plain, recipe, **options_of(recipe)))


# Other operations of quantized matrices.


# Products.


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


@pytest.mark.sampled(10)
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
