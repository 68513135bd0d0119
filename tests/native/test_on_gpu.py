"""Tests for a GPU alone: the oracle on a GPU, calls that do not wait for the GPU, and large inputs.

Tests marked ON_EVERY_DEVICE compare the kernels on a GPU with the reference and exact arithmetic on a CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.gemm import skinny as gemm_skinny
from narrowgauge.native.modules import Linear, autocast
from narrowgauge.native.quantize.amax import another_grid
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe
from tests.golden import bits
from tests.native import fp8, layers, skinny
from tests.native.devices import converted, moved
from tests.native.gemm.test_gemm_skinny import E4M3, operands
from tests.native.gpu import DEVICE, needs_gpu
from tests.native.quantize.test_sections import SIZES, sections
from tests.native.samples import (
    DTYPES,
    FAMILIES,
    NAMES,
    ROTATED,
    SECTIONED,
    assert_both_same,
    assert_equal,
    assert_same,
    codes_under_every_scale,
    dtype_in_turn,
    fitting,
    matrix,
    options_of,
    sample,
)

pytestmark = needs_gpu
FP32 = torch.float32
ALL = (*NAMES, *fp8.NAMES)


def there(value: Any) -> Any:
    """`value` with its tensors on the GPU."""
    return converted(value, lambda x: moved(x, DEVICE))


@contextmanager
def without_waiting() -> Iterator[None]:
    """Within the context torch raises if the host waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not detect every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


# The reference on a GPU gives the bytes of the reference on a CPU.


@pytest.mark.parametrize("name", ALL)
def test_the_reference_quantizes_the_same_bytes(name: str) -> None:
    recipe = find_recipe(name)
    matrices = [sample(recipe, family, 131, 140, dtype_in_turn(name, family)) for family in FAMILIES]
    for x in (*matrices, torch.empty((0, 128), dtype=torch.bfloat16)):
        here, on_gpu = (reference.quantize_both(y, recipe, **given) for y, given in (
            (x, options_of(recipe)), (there(x), there(options_of(recipe))),
        ))  # fmt: skip
        assert_both_same(on_gpu, here)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_the_reference_dequantizes_and_rotates_the_same_bytes(dtype: torch.dtype) -> None:
    for amax, columns in product((0.0, 1e-45, 1e-38, 65.0, 2688.0, torch.inf, torch.nan), (15, 16)):
        q = codes_under_every_scale(amax, columns)
        assert_equal(reference.dequantize(there(q), dtype), reference.dequantize(q, dtype))
    for name, family in product(ROTATED, ("outliers", "nan", "any bits") if dtype == torch.bfloat16 else ()):
        x = matrix(family, 130, fitting(512, find_recipe(name)), dtype)
        assert_equal(reference.transform(there(x), name), reference.transform(x, name))


# Calls that do not wait.


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("name", [*SECTIONED, *fp8.NAMES])
def test_sizes_of_sections_stay_on_the_gpu(name: str, columnwise: bool) -> None:
    recipe = find_recipe(name)
    for wanted in SIZES[4:6]:
        sizes, columns = sections(name, wanted, columnwise)
        x = there(matrix("outliers", sum(sizes), columns, torch.bfloat16))
        options = {"columnwise": columnwise, **there(options_of(recipe, len(sizes)))}
        arguments = (x, there(torch.tensor(sizes)), recipe)
        ops.quantize_grouped(*arguments, **options)  # loads the kernels
        with without_waiting():
            ops.quantize_grouped(*arguments, **options)


# torch gives this warning if the first call of a process's backward thread is a product of cuBLAS.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("recipe", [*layers.SOME, None])
def test_a_training_step_does_not_wait(recipe: str | None) -> None:
    (step,) = layers.steps(1, 64, 96, 32)
    layer = Linear(96, 32, device=DEVICE)
    x, dy = step.x.to(DEVICE).requires_grad_(), step.dy.to(DEVICE)

    def train() -> None:
        with autocast(recipe):
            y = layer(x)
        y.backward(dy)

    train()  # loads the kernels, and makes the history
    torch.cuda.synchronize()
    with without_waiting():
        train()


# Large inputs.


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_the_amax_of_more_elements_than_a_stride_of_the_grid(dtype: torch.dtype) -> None:
    """The grid has 1024 blocks of 256 threads with 16 elements each."""
    x = torch.zeros(5_000_001, dtype=dtype, device=DEVICE)
    for place in (0, 15, 16, 4095, 4096, 4_194_303, 4_194_304, 2_500_000, 5_000_000):
        x[place] = -1.5
        assert ops.amax(x).tolist() == [1.5], place
        x[place] = 0.5


@pytest.mark.parametrize("name", fp8.KINDS)
def test_many_tiles_and_unaligned_rows(name: str) -> None:
    """Wide loads and stores for aligned addresses, bytes for other addresses."""
    options = there(options_of(find_recipe(name)))
    for rows, columns in ((1024, 2048), (1008, 2000), (999, 1001)):
        x = there(matrix("outliers", rows, columns, torch.bfloat16))
        for part in (x, x[1:, 1:], x[3:, 8:]):
            assert_both_same(ops.quantize_both(part, name, **options), reference.quantize_both(part, name, **options))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d", "nvfp4-rht", "nvfp4-rht-sr"])
def test_tiles_that_are_not_finite_are_quantized_again(name: str) -> None:
    """By a block of threads with five tiles, two of them not finite, and by blocks with two tiles."""
    x, amax = matrix("normal", (16 + 5) * 64, 128, torch.bfloat16), torch.tensor([6.0])
    for tile, row, column, value in (
        (1, 5, 7, torch.nan), (4, 63, 127, -torch.inf), (5, 0, 0, torch.inf), (8, 9, 64, 1e30),
    ):  # fmt: skip
        x[tile * 64 + row, column] = value
    options = {"amax": (amax, amax), **options_of(find_recipe(name))}
    with another_grid():
        got = ops.quantize_both(there(x), name, **there(options))
    assert_both_same(got, reference.quantize_both(x, name, **options))


def test_more_rows_than_the_grid_has_warps_are_padded() -> None:
    sizes = torch.tensor([700_000, 0, 3, 30_000])
    x = torch.arange(730_003 * 4, device=DEVICE).view(-1, 4)
    got, aligned = ops.pad_sections(x, sizes, "fp8-current-e4m3")
    assert_equal(got, reference.pad_sections(x, sizes, "fp8-current-e4m3")[0])
    assert int(aligned.sum()) == len(got)
    assert_equal(ops.unpad_sections(got, sizes, "fp8-current-e4m3"), x)


def test_subnormal_numbers_are_kept() -> None:
    """CuPy appends -ftz=true to the flags of a kernel compiled by CuPy itself."""
    x = torch.arange(-64, 64, dtype=FP32).view(8, 16) * 2.0**-149
    assert x.count_nonzero() == 127, "the CPU keeps them"
    assert bits(ops.amax(there(x)).cpu()).tolist() == [64]
    for amax in (None, 1e-45, 1e-42, 1e-38):
        options = {} if amax is None else {"amax": torch.tensor([amax])}
        assert_same(ops.quantize(there(x), "nvfp4", **there(options)), reference.quantize(x, "nvfp4", **options))
    y = ops.dequantize(there(codes_under_every_scale(1e-38)))
    assert ((y != 0) & (y.abs() < torch.finfo(FP32).smallest_normal)).sum() > 1000


def test_few_rows_by_many_blocks_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks run at once: a missing barrier shows here. A CPU computes some rows of b."""
    a, b = operands("nvfp4", 16, 8448, 8192)
    assert gemm_skinny.wide(16, 8448, 8192)
    left, right = there(a), there(b)
    y = skinny.product(left, right, out_dtype=FP32)
    for _ in range(20):
        assert torch.equal(skinny.product(left, right, out_dtype=FP32), y)
    monkeypatch.setattr(gemm_skinny, "wide", lambda *_: True)
    for first in (0, 4096, 8448 - 64):
        rows = slice(first, first + 64)
        some = replace(b, codes=b.codes[rows], scales=b.scales[rows], shape=(64, 8192))
        assert_equal(y[:, rows], skinny.product(a, some, out_dtype=FP32))


@pytest.mark.parametrize("name", E4M3)
def test_a_block_multiplies_strips_in_turn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a large N: on a single multiprocessor for each 16 rows of a."""
    a, b = operands(name, 20, 300, 2304)
    expected = skinny.product(a, b, out_dtype=FP32)
    monkeypatch.setattr(gemm_skinny, "multiprocessors", lambda device: 2)
    for _ in range(20):
        assert_equal(skinny.product(there(a), there(b), out_dtype=FP32), expected)
