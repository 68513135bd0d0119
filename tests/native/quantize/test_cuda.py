"""The kernels on a GPU: byte for byte what they give on a CPU, what the reference gives, and the golden bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.ops import Quantized
from narrowgauge.reference import ops as reference
from narrowgauge.reference.bounds.bounds import bounds
from tests.golden import bits, floats, golden, load, quantize_input
from tests.native import declared
from tests.native.gpu import DEVICE, needs_compiler, needs_gpu
from tests.native.guards import embedded, guarded_outputs
from tests.native.samples import (
    DTYPES,
    FAMILIES,
    RECIPES,
    assert_equal,
    assert_same,
    codes_under_every_scale,
    matrix,
    to,
)
from tests.reference import samples

pytestmark = needs_gpu
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
AMAXES = [0.0, 1e-45, 1e-40, 1e-38, 7.8e-36, 0.1, 65.0, 2688.0, 1e30, 3.4028235e38, math.inf, math.nan]
EMPTY = [(0, 0), (0, 32), (5, 0)]


def quantized(x: torch.Tensor, recipe: str = "te", amax: float | None = None) -> Quantized:
    """`x`, which lies on the CPU, quantized by the kernel on the GPU; the result stays there."""
    given = None if amax is None else torch.tensor([amax], device=DEVICE)
    q = ops.quantize(x.to(DEVICE), RECIPES[recipe], amax=given)
    assert {part.device.type for part in (q.codes, q.scales, q.amax, q.tensor_scale)} == {DEVICE}
    return q


def inputs(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, str]]:
    """Every family under every recipe, tails in M and K, every half-precision number, empty matrices."""
    for family, recipe in product(FAMILIES, RECIPES):
        yield matrix(family, 67, 128, dtype), recipe
        yield matrix(family, 70, 77, dtype), recipe
    for rows, columns in product((1, 2, 17, 129), (*range(1, 34), 47, 63, 65, 4097)):
        yield matrix("outliers", rows, columns, dtype), "te"
        yield matrix("nan", rows, columns, dtype), "te-propagate"
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(-1, 64)
    if dtype != torch.float32:
        yield patterns.view(dtype), "te"
        yield patterns.view(dtype), "te-2.8"
    for shape in EMPTY:
        yield torch.empty(shape, dtype=dtype), "te"


# amax and quantize.


@pytest.mark.parametrize("path", golden("quantize_*.npz"))
def test_nvfp4_gives_transformer_engines_bytes(path: Path) -> None:
    arrays = load(path)
    x = quantize_input(path, arrays)
    for suffix, rows in (("", x), ("_t", x.T.contiguous())):
        q = quantized(rows)
        np.testing.assert_array_equal(bits(q.amax.cpu()), arrays[f"nvfp4.amax{suffix}"].view(np.int32))
        np.testing.assert_array_equal(q.scales.cpu(), arrays[f"nvfp4.scales{suffix}"])
        np.testing.assert_array_equal(q.codes.cpu(), arrays[f"nvfp4.codes{suffix}"])
    q = quantized(x, "te-2.8")
    np.testing.assert_array_equal(q.scales.cpu(), arrays["nvfp4@te-2.8.scales"])
    np.testing.assert_array_equal(q.codes.cpu(), arrays["nvfp4@te-2.8.codes"])


@EVERY_DTYPE
def test_quantize_gives_the_references_bytes_on_either_device(dtype: torch.dtype) -> None:
    for x, recipe in inputs(dtype):
        q = quantized(x, recipe)
        assert_same(q, reference.quantize(x, RECIPES[recipe]))
        assert_same(q, reference.quantize(x.to(DEVICE), RECIPES[recipe]))


@needs_compiler
@EVERY_DTYPE
def test_quantize_gives_the_bytes_that_it_gives_on_a_cpu(dtype: torch.dtype) -> None:
    for x, recipe in inputs(dtype):
        assert_same(quantized(x, recipe), ops.quantize(x, RECIPES[recipe]))


@EVERY_DTYPE
@pytest.mark.parametrize("recipe", ["te", "te-2.8", "te-propagate"])
def test_a_given_amax_replaces_the_tensors_own(recipe: str, dtype: torch.dtype) -> None:
    for amax, family in product(AMAXES, ("normal", "nan", "subnormal", "huge", "any bits")):
        x = matrix(family, 9, 45, dtype)
        assert_same(quantized(x, recipe, amax), reference.quantize(x, RECIPES[recipe], amax=torch.tensor([amax])))


def test_every_exponent_of_the_amax_is_quantized_as_the_reference_does() -> None:
    pattern = torch.tensor([[1.0, -0.75, 0.5, 0.31, 0.25, -0.1, 0.04, 0.01, 1e-3, 0.0]])
    for exponent in range(-149, 128):
        for factor in (1.0, 1 - 2.0**-24):
            x = (pattern.double() * math.ldexp(factor, exponent)).float()
            assert_same(quantized(x), reference.quantize(x, "nvfp4"))


@EVERY_DTYPE
@pytest.mark.parametrize("count", [1, 4097, 300_001, 5_000_001])
def test_the_amax_is_found_wherever_it_lies(count: int, dtype: torch.dtype) -> None:
    """Up to more elements than all threads of the grid take in one stride: 1024 blocks of 256 threads of 16."""
    x = torch.zeros(count, dtype=dtype, device=DEVICE)
    for place in {0, 15, 16, 4095, 4096, 4_194_303, 4_194_304, count // 2, count - 1}:
        if place < count:
            x[place] = -1.5
            assert ops.amax(x).tolist() == [1.5], place
            x[place] = 0.5


# Subnormal numbers.


def test_subnormal_numbers_are_kept() -> None:
    """CuPy appends -ftz=true where it compiles a kernel itself."""
    x = torch.arange(-64, 64, dtype=torch.float32).view(8, 16) * 2.0**-149
    assert x.count_nonzero() == 127, "the CPU keeps them"
    assert bits(ops.amax(x.to(DEVICE)).cpu()).tolist() == [64]
    assert ops.quantize(x.to(DEVICE), "nvfp4").tensor_scale.tolist() == [torch.finfo(torch.float32).max]
    for amax in (None, 1e-45, 1e-42, 1e-38):
        given = None if amax is None else torch.tensor([amax])
        q = quantized(x, amax=amax)
        assert_same(q, reference.quantize(x, "nvfp4", amax=given))
    y = ops.dequantize(to(codes_under_every_scale(1e-38), DEVICE)).cpu()
    subnormal = (y != 0) & (y.abs() < torch.finfo(torch.float32).smallest_normal)
    assert subnormal.sum() > 1000


# dequantize.


@EVERY_DTYPE
@pytest.mark.parametrize("columns", [15, 16])
def test_every_code_under_every_scale_has_the_references_value_on_either_device(
    columns: int, dtype: torch.dtype
) -> None:
    for amax in AMAXES:
        q = codes_under_every_scale(amax, columns)
        y = ops.dequantize(to(q, DEVICE), dtype)
        assert y.device.type == DEVICE
        assert_equal(y, reference.dequantize(q, dtype))
        assert_equal(y, reference.dequantize(to(q, DEVICE), dtype))


@needs_compiler
@EVERY_DTYPE
def test_dequantize_gives_the_bytes_that_it_gives_on_a_cpu(dtype: torch.dtype) -> None:
    operands = [codes_under_every_scale(amax, columns) for amax in AMAXES for columns in (15, 16)]
    shapes = [*product((1, 17, 129), (*range(1, 34), 47, 63, 65, 4097)), *EMPTY]
    operands += [ops.quantize(matrix("outliers", *shape, torch.float32), "nvfp4") for shape in shapes if 0 not in shape]
    operands += [ops.quantize(torch.empty(shape), "nvfp4") for shape in EMPTY]
    for q in operands:
        assert_equal(ops.dequantize(to(q, DEVICE), dtype), ops.dequantize(q, dtype))


# gemm.


def pairs() -> Iterator[tuple[Quantized, Quantized]]:
    """Operands on the CPU: every family in several tiles and steps of K, every tail, empty ones."""
    rng = np.random.default_rng(0)
    for family, (m, n, k) in product(samples.FAMILIES, [(3, 5, 16), (70, 66, 80), (8, 8, 2048)]):
        left, left_scales, right, right_scales = samples.operands(family, rng, m, n, k)
        yield samples.quantized(left, left_scales, 3.3), samples.quantized(right, right_scales, 65.0)
    shapes = [(5, 7, k) for k in (*range(1, 34), 47, 63, 65)] + [(m, n, 40) for m in (1, 64, 129) for n in (7, 65, 130)]
    for m, n, k in [*shapes, (0, 3, 32), (2, 0, 32), (0, 0, 0), (2, 3, 0)]:
        a, b = (matrix("outliers", rows, k, torch.float32, seed=s) if rows * k else torch.empty(rows, k)
                for s, rows in ((1, m), (2, n)))  # fmt: skip
        yield reference.quantize(a, "nvfp4@te-native"), reference.quantize(b, "nvfp4@te-native")


@pytest.mark.parametrize("path", golden("gemm_*.npz"))
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_transformer_engines_wherever_no_sum_can_round(
    path: Path, accumulate: bool, out_dtype: torch.dtype
) -> None:
    arrays = load(path)
    a, b = (quantized(floats(arrays[side], torch.bfloat16)) for side in ("x", "w"))
    short = "fp32" if out_dtype == torch.float32 else "bf16"
    theirs = floats(arrays[f"y.{short}{'.accumulate' * accumulate}"], out_dtype)
    c = torch.from_numpy(arrays["c"]).to(out_dtype).to(DEVICE) if accumulate else None
    ours = ops.gemm(a, b, out_dtype=out_dtype, c=c)
    limits = bounds(a, b, out_dtype=out_dtype, c=c)
    assert ((limits.lower <= ours) & (ours <= limits.upper)).all()
    exact = (limits.exact & ~limits.zero_sum).cpu()
    assert exact.any()
    assert torch.equal(bits(ours.cpu())[exact], bits(theirs)[exact])


@pytest.mark.parametrize("out_dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_gemm_adds_blocks_in_order_of_k_within_the_references_bounds_on_either_device(out_dtype: torch.dtype) -> None:
    for a, b in pairs():
        y = ops.gemm(to(a, DEVICE), to(b, DEVICE), out_dtype=out_dtype)
        assert y.device.type == DEVICE
        assert_equal(y, declared.gemm(a, b, out_dtype=out_dtype))
        here, there = (bounds(to(a, d), to(b, d), out_dtype=out_dtype) for d in ("cpu", DEVICE))
        nonzero = ~here.zero_sum  # the sign of a sum of 0 depends on the order
        assert torch.equal(bits(there.expected.cpu())[nonzero], bits(here.expected)[nonzero])
        exact = here.exact & nonzero
        assert torch.equal(bits(y.cpu())[exact], bits(here.expected)[exact])
        assert ((there.lower <= y) & (y <= there.upper)).all()


@needs_compiler
@pytest.mark.parametrize("out_dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("c_dtype", [None, *DTYPES])
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
def test_gemm_gives_the_bytes_that_it_gives_on_a_cpu(
    out_dtype: torch.dtype, c_dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> None:
    for a, b in pairs():
        m, n = a.shape[0], b.shape[0]
        c = None if c_dtype is None else torch.linspace(-3, 3, m * n).view(m, n).to(c_dtype)
        bias = None if bias_dtype is None else torch.linspace(-1, 1, n).to(bias_dtype)
        added = {name: None if x is None else x.to(DEVICE) for name, x in (("c", c), ("bias", bias))}
        y = ops.gemm(to(a, DEVICE), to(b, DEVICE), out_dtype=out_dtype, **added)
        assert_equal(y, ops.gemm(a, b, out_dtype=out_dtype, c=c, bias=bias))


@pytest.mark.parametrize("recipe", ["te", "te-native"])
def test_alpha_is_formed_in_the_recipes_order(recipe: str) -> None:
    amaxes = [1e-45, 1e-20, 1.0, 1e30, 3.4e38, 0.0, math.inf, *np.random.default_rng(1).uniform(0.1, 300, 10).tolist()]
    for pair in product(amaxes, amaxes):
        a, b = (reference.quantize(torch.ones(1, 16), RECIPES[recipe], amax=torch.tensor([v])) for v in pair)
        y = ops.gemm(to(a, DEVICE), to(b, DEVICE), out_dtype=torch.float32)
        assert_equal(y, declared.gemm(a, b, out_dtype=torch.float32))


# Memory and repetition.


@EVERY_DTYPE
@pytest.mark.parametrize("columns", [1, 16, 17, 31, 77])
def test_nothing_outside_the_operands_is_read_and_nothing_outside_the_outputs_is_written(
    columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = matrix("outliers", 65, columns, dtype)
    x = embedded(plain.to(DEVICE))
    with guarded_outputs(monkeypatch):
        q = ops.quantize(x, "nvfp4")
    expected = reference.quantize(plain, "nvfp4")
    assert_same(q, expected)
    assert torch.equal(bits(x.cpu()), bits(plain))
    q.codes, q.scales, q.amax = (embedded(part.clone()) for part in (q.codes, q.scales, q.amax))
    with guarded_outputs(monkeypatch):
        y, z = ops.dequantize(q, dtype), ops.gemm(q, q, out_dtype=dtype)
    assert_equal(y, reference.dequantize(expected, dtype))
    assert_equal(z, declared.gemm(expected, expected, out_dtype=dtype))
    assert_same(q, expected)


@EVERY_DTYPE
def test_two_runs_give_the_same_bytes(dtype: torch.dtype) -> None:
    x = matrix("outliers", 300, 1000, dtype).to(DEVICE)
    variations = ops.variations(x.device)
    assert len(variations) == 2
    results = []
    for context in variations.values():
        with context():
            q = ops.quantize(x, "nvfp4")
            results.append((q, ops.dequantize(q, dtype), ops.gemm(q, q, out_dtype=dtype)))
    assert_same(results[0][0], results[1][0])
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        assert_equal(one, other)
