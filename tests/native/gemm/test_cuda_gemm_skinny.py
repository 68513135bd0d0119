"""Products of a few rows on a GPU: the declared order, which is a CPU's, and what any order can give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.native import ops
from narrowgauge.native.gemm import skinny as gemm_skinny
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.spec.summation import Summation
from tests.native import skinny
from tests.native.gemm.test_gemm_skinny import E4M3, FP32, NAMES, ends, every_code_and_scale, operands
from tests.native.gemm.test_gemm_skinny_wide import WIDE_SHAPES
from tests.native.gpu import DEVICE, needs_gpu
from tests.native.guards import guarded_outputs
from tests.native.samples import assert_equal, matrix, to

pytestmark = needs_gpu

EITHER = pytest.mark.parametrize("wide", [False, True], ids=["", "wide"])
"""Kernel of NVFP4."""


@EITHER
@pytest.mark.parametrize("name", NAMES)
def test_sums_are_in_the_declared_order(name: str, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_skinny, "wide", lambda m, n, k: wide and k % 512 == 0)
    for m, n, k in WIDE_SHAPES:
        a, b = operands(name, m, n, k)
        bias = matrix("normal", 1, n, FP32).view(n)
        with guarded_outputs(monkeypatch):
            y = skinny.product(to(a, DEVICE), to(b, DEVICE), out_dtype=FP32, bias=bias.to(DEVICE))
        assert_equal(y, skinny.gemm(a, b, out_dtype=FP32, bias=bias))


@EITHER
def test_every_code_and_every_scale_is_multiplied_as_the_portable_kernels_do_it(
    wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_skinny, "wide", lambda m, n, k: wide and k % 512 == 0)
    for q in every_code_and_scale("nvfp4", *E4M3[:3], columns=512):
        assert_equal(skinny.product(to(q, DEVICE), to(q, DEVICE), out_dtype=FP32), ops.gemm(q, q, out_dtype=FP32))


def test_sums_of_many_blocks_and_runs_are_in_the_declared_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all blocks that run at once: threads that do not wait for others show here. Some rows of b on a CPU."""
    a, b = operands("nvfp4", 16, 8448, 8192)
    assert gemm_skinny.wide(16, 8448, 8192)
    left, right = to(a, DEVICE), to(b, DEVICE)
    y = skinny.product(left, right, out_dtype=FP32)
    for _ in range(20):
        assert torch.equal(skinny.product(left, right, out_dtype=FP32), y)
    monkeypatch.setattr(gemm_skinny, "wide", lambda *_: True)
    for first in (0, 4096, 8448 - 64):
        rows = slice(first, first + 64)
        some = replace(b, codes=b.codes[rows], scales=b.scales[rows], shape=(64, 8192))
        assert_equal(y[:, rows], skinny.product(a, some, out_dtype=FP32))


@pytest.mark.parametrize("name", E4M3)
def test_a_block_multiplies_more_strips_than_fit_together_in_turn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where N is large: on one multiprocessor for each 16 rows of a."""
    a, b = operands(name, 20, 300, 2304)
    right = skinny.product(a, b, out_dtype=FP32)
    monkeypatch.setattr(gemm_skinny, "multiprocessors", lambda device: 2)
    for _ in range(20):
        assert_equal(skinny.product(to(a, DEVICE), to(b, DEVICE), out_dtype=FP32), right)


def test_scales_of_a_become_part_of_its_numbers_only_as_far_as_that_is_exact() -> None:
    for a, b in ends():
        y = skinny.product(to(a, DEVICE), to(b, DEVICE), out_dtype=FP32)
        assert_equal(y, skinny.product(a, b, out_dtype=FP32))


@pytest.mark.parametrize("name", ["nvfp4", *E4M3])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 8192, 8192), (64, 1000, 4096)], ids=str)
def test_large_ones_are_within_what_any_order_can_give(name: str, m: int, n: int, k: int) -> None:
    names = name.replace("128x128", "1x128"), name
    a, b = (ops.quantize(torch.randn(rows, k, device=DEVICE), of) for rows, of in zip((m, n), names, strict=True))
    limits = bounds(a, b, out_dtype=torch.bfloat16, order=Summation(None, truncates=True))
    first, second = (skinny.product(a, b, out_dtype=torch.bfloat16) for _ in range(2))
    assert bool(within_bounds(first, limits).all())
    assert torch.equal(first, second)
