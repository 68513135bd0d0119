"""amax and quantize on a CPU: golden bytes, and byte for byte what the reference gives."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.reference import ops as reference
from tests.golden import bits, golden, load, quantize_input
from tests.native.guards import embedded, guarded_outputs
from tests.native.samples import DTYPES, FAMILIES, RECIPES, assert_equal, assert_same, matrix
from tests.thinned import thinned

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])


def assert_as_reference(x: torch.Tensor, recipe: str = "te", amax: float | None = None) -> None:
    given = None if amax is None else torch.tensor([amax])
    assert_same(ops.quantize(x, RECIPES[recipe], amax=given), reference.quantize(x, RECIPES[recipe], amax=given))


# Golden bytes of Transformer Engine.


@pytest.mark.parametrize("path", golden("quantize_*.npz"))
def test_nvfp4_gives_transformer_engines_bytes(path: Path) -> None:
    arrays = load(path)
    x = quantize_input(path, arrays)
    for suffix, rows in (("", x), ("_t", x.T.contiguous())):
        q = ops.quantize(rows, "nvfp4")
        assert q.amax is not None
        np.testing.assert_array_equal(bits(q.amax), arrays[f"nvfp4.amax{suffix}"].view(np.int32))
        np.testing.assert_array_equal(q.scales, arrays[f"nvfp4.scales{suffix}"])
        np.testing.assert_array_equal(q.codes, arrays[f"nvfp4.codes{suffix}"])


@pytest.mark.parametrize("path", golden("quantize_*.npz"))
def test_te_28_gives_transformer_engine_29s_bytes(path: Path) -> None:
    arrays = load(path)
    q = ops.quantize(quantize_input(path, arrays), "nvfp4@te-2.8")
    np.testing.assert_array_equal(q.scales, arrays["nvfp4@te-2.8.scales"])
    np.testing.assert_array_equal(q.codes, arrays["nvfp4@te-2.8.codes"])


# amax.


@EVERY_DTYPE
@pytest.mark.parametrize("count", [1, 15, 16, 17, 255, 4096, 4097, 300_001])
def test_the_amax_is_found_wherever_it_lies(count: int, dtype: torch.dtype) -> None:
    """Up to more elements than all threads of the grid take in one stride."""
    x = torch.zeros(count, dtype=dtype)
    places = {0, 1, 15, 16, 4095, 4096, 262_143, 262_144, count // 2, count - 2, count - 1}
    for place in sorted(place for place in places if 0 <= place < count):
        x[place] = -1.5
        assert ops.amax(x).tolist() == [1.5], place
        x[place] = 0.5


@EVERY_DTYPE
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("propagate_nan", [False, True])
def test_the_amax_is_the_largest_magnitude(family: str, dtype: torch.dtype, propagate_nan: bool) -> None:
    x = matrix(family, 37, 45, dtype)
    magnitudes = x.abs().float().ravel()
    expected = magnitudes.max() if propagate_nan else magnitudes.nan_to_num(nan=0.0, posinf=math.inf).max()
    assert_equal(ops.amax(x, propagate_nan=propagate_nan), expected.view(1))


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (3, 4, 5)])
def test_the_amax_of_a_tensor_of_any_rank(shape: tuple[int, ...]) -> None:
    x = torch.full(shape, -2.0)
    assert ops.amax(x).tolist() == [2.0 if x.numel() else 0.0]


# Quantize against the reference.


@EVERY_DTYPE
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_quantized_as_the_reference_does(family: str, recipe: str, dtype: torch.dtype) -> None:
    """Whole blocks and tails, in more than one block of threads."""
    for rows, columns in ((67, 128), (70, 77)):
        assert_as_reference(matrix(family, rows, columns, dtype), recipe)


@EVERY_DTYPE
@pytest.mark.parametrize("columns", thinned([*range(1, 34), 47, 48, 63, 65, 4097], 2))
def test_any_shape_is_quantized_as_the_reference_does(columns: int, dtype: torch.dtype) -> None:
    for rows in (1, 17, 129):
        for recipe in ("te", "te-propagate"):
            assert_as_reference(matrix("nan", rows, columns, dtype), recipe)
        assert_as_reference(matrix("outliers", rows, columns, dtype))


@EVERY_DTYPE
@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (0, 32), (5, 0), (0, 7)])
def test_an_empty_matrix_gives_empty_codes_and_scales(rows: int, columns: int, dtype: torch.dtype) -> None:
    q = ops.quantize(torch.empty(rows, columns, dtype=dtype), "nvfp4")
    assert q.codes.shape == (rows, -(-columns // 2))
    assert q.scales.shape == (rows, -(-columns // 16))
    assert_as_reference(torch.empty(rows, columns, dtype=dtype))


@EVERY_DTYPE
@pytest.mark.parametrize("recipe", ["te", "te-2.8", "te-propagate"])
@pytest.mark.parametrize(
    "amax",
    [0.0, -0.0, 1e-45, 1e-40, 1.1754942e-38, 7.8e-36, 8e-36, 0.1, 65.0, 2688.0, 3.4028235e38, math.inf, math.nan],
)
def test_a_given_amax_replaces_the_tensors_own(amax: float, recipe: str, dtype: torch.dtype) -> None:
    for family in ("normal", "nan", "subnormal", "huge", "any bits"):
        assert_as_reference(matrix(family, 9, 45, dtype), recipe, amax)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ["te", "te-2.8"])
def test_every_half_precision_number_is_quantized_as_the_reference_does(recipe: str, dtype: torch.dtype) -> None:
    """In blocks of neighbours, and as the largest element of a block of its own."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    alone = torch.zeros(1 << 16, 16, dtype=dtype)
    alone[:, 3] = patterns
    for amax in (448.0, 65.0, 1.0):
        assert_as_reference(patterns.view(-1, 64), recipe, amax)
        assert_as_reference(alone, recipe, amax)


def test_every_exponent_of_the_amax_is_quantized_as_the_reference_does() -> None:
    pattern = torch.tensor([[1.0, -0.75, 0.5, 0.31, 0.25, -0.1, 0.04, 0.01, 1e-3, 0.0]])
    for exponent in range(-149, 128):
        for factor in (1.0, 1 - 2.0**-24):
            assert_as_reference((pattern.double() * math.ldexp(factor, exponent)).float())


# Where the choices of a recipe matter.


@EVERY_DTYPE
def test_the_two_orders_of_the_block_scale_differ_on_ties_and_each_is_the_references(dtype: torch.dtype) -> None:
    x = matrix("e4m3 ties", 64, 256, dtype)
    one, other = (ops.quantize(x, recipe) for recipe in ("nvfp4", "nvfp4@te-2.8"))
    assert not torch.equal(one.scales, other.scales)
    for recipe in ("te", "te-2.8"):
        assert_as_reference(x, recipe)


@EVERY_DTYPE
def test_a_nan_is_left_out_or_makes_every_scale_nan(dtype: torch.dtype) -> None:
    """An odd number of columns: the last high nibble stays 0 whatever the scale."""
    x = torch.ones(3, 37, dtype=dtype)
    x[1, 4] = torch.nan
    ignored, propagated = (ops.quantize(x, RECIPES[recipe]) for recipe in ("te", "te-propagate"))
    assert ignored.amax.tolist() == [1.0]
    assert (ignored.scales == 0x7E).all()
    assert propagated.amax.isnan().all()
    assert (propagated.scales == 0x7F).all()
    for q in (ignored, propagated):
        assert (q.codes[:, -1] >> 4 == 0).all()


# Memory.


@EVERY_DTYPE
@pytest.mark.parametrize("columns", [1, 16, 17, 31, 64, 77])
def test_nothing_outside_the_matrix_is_read_and_nothing_outside_the_outputs_is_written(
    columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = embedded(matrix("outliers", 19, columns, dtype))
    before = x.clone()
    for amax in (None, embedded(torch.tensor([3.0]))):
        with guarded_outputs(monkeypatch):
            q = ops.quantize(x, "nvfp4", amax=amax)
        assert_same(q, reference.quantize(before, "nvfp4", amax=amax))
    assert torch.equal(bits(x), bits(before))
