"""MX on a GPU: every rule of the exponent by its definition, every half-precision number, every code under every scale.

Families, shapes, views, sections and memory are in test_cuda_variants.py, beside those of NVFP4.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.reference import ops as reference
from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format
from narrowgauge.spec.recipes import find_recipe
from tests.golden import golden, load, quantize_input
from tests.native import conversions, exact_mx
from tests.native.gpu import DEVICE, needs_gpu
from tests.native.guards import embedded, guarded_outputs
from tests.native.launching import Source
from tests.native.quantize import test_stochastic
from tests.native.quantize.test_mx import ELEMENTS, RULES, amaxes
from tests.native.samples import (
    DTYPES,
    assert_both_same,
    assert_equal,
    assert_same,
    codes_under_every_power,
    matrix,
    to,
)

pytestmark = needs_gpu


@pytest.mark.parametrize("path", golden("quantize_*_32x128_*.npz"))
def test_tiles_have_transformer_engines_bytes(path: Path) -> None:
    arrays = load(path)
    row, column = ops.quantize_both(quantize_input(path, arrays).to(DEVICE), "mxfp8-2d")
    assert row is not None
    assert column is not None
    for half, scales in ((row, "scales"), (column, "scales_t")):
        np.testing.assert_array_equal(half.codes.cpu(), arrays["mxfp8-2d.codes"])
        np.testing.assert_array_equal(half.scales.cpu(), arrays[f"mxfp8-2d.{scales}"])


@pytest.mark.parametrize("recipe", RULES)
def test_every_border_of_the_rule_at_every_exponent_is_rounded_as_it_is_defined(recipe: str) -> None:
    r = find_recipe(recipe)
    numbers = amaxes(r)
    scales = ops.quantize(torch.from_numpy(numbers).unsqueeze(1).to(DEVICE), r).scales.ravel().tolist()
    assert scales == [exact_mx.scale_code(number, r) for number in numbers]


@pytest.mark.parametrize("recipe", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_is_quantized_as_the_reference_does(recipe: str, dtype: torch.dtype) -> None:
    """In blocks of neighbours, and as the largest element of a block of its own."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    alone = torch.zeros(1 << 16, 32, dtype=dtype)
    alone[:, 5] = patterns
    for x in (patterns.view(-1, 32), alone):
        for nan in ("ignore", "propagate"):
            r = replace(find_recipe(recipe), nan=nan)  # type: ignore[arg-type]
            assert_same(ops.quantize(x.to(DEVICE), r), reference.quantize(x, r))


@pytest.mark.parametrize("recipe", [*RULES, "mxfp8-2d"])
def test_every_bfloat16_number_is_quantized_in_whole_tiles_as_the_reference_does(recipe: str) -> None:
    """NaN and infinities beside others, and in columns by themselves."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for x in (patterns.view(-1, 256), patterns.view(256, -1).T.contiguous()):
        for nan, swizzled in product(("ignore", "propagate"), (False, True)):
            r = replace(find_recipe(recipe), nan=nan)  # type: ignore[arg-type]
            expected = reference.quantize_both(x, r, swizzled=swizzled)
            assert_both_same(ops.quantize_both(x.to(DEVICE), r, swizzled=swizzled), expected)
            assert_same(ops.quantize(x.to(DEVICE), r, swizzled=swizzled), expected[0])


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 64, 77])
def test_nothing_outside_is_read_or_written_by_the_plain_kernel(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = replace(find_recipe(name), nan="propagate")
    for dtype in DTYPES:
        plain = matrix("outliers", 19, columns, dtype)
        x = embedded(plain.to(DEVICE))
        with guarded_outputs(monkeypatch):
            q = ops.quantize(x, r)
        assert_same(q, reference.quantize(plain, r))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_code_under_every_power_of_two_has_its_value(name: str, dtype: torch.dtype) -> None:
    q = codes_under_every_power(name)
    expected = reference.dequantize(q, dtype)
    assert_equal(ops.dequantize(to(q, DEVICE), dtype), expected)
    if q.recipe.element.bits != 4:
        turned = replace(q, codes=q.codes.T.contiguous(), scales=q.scales.T.contiguous(), transposed=True)
        assert_equal(ops.dequantize(to(turned, DEVICE), dtype), expected)


@pytest.mark.parametrize("fmt", [E2M1, E2M3, E3M2, E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_every_narrow_format_is_rounded_by_a_byte_as_the_reference_does(cuda_source: Source, fmt: Format) -> None:
    for x in (conversions.bf16_values()[::5], test_stochastic.crossings(fmt)):
        got = test_stochastic.codes(cuda_source(test_stochastic.TEXT), x, device=DEVICE, fmt=fmt)
        assert torch.equal(got, test_stochastic.reference_codes(x, fmt))
