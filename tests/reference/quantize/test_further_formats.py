"""Elements E0M3 and INT4, scales UE5M3 and blocks of 16 under E8M0, against exact rationals, one number at a time."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops
from narrowgauge.reference.quantize.layout import elements
from narrowgauge.reference.scalar import rounding
from narrowgauge.spec.formats import E0M3, E2M1, E4M3, E8M0, INT4, UE5M3, Format
from narrowgauge.spec.recipes import find_recipe
from tests.harness.sample_backends import backend

f32 = np.float32


def samples(fmt: Format) -> torch.Tensor:
    """Rows of midpoints of the element, of random numbers, of zeros and of small numbers, (8, 64)."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 64, generator=generator)
    values = torch.tensor(fmt.values[: fmt.max_code + 1])
    ties = (values[1:] + values[:-1]) / 2
    x[0] = ties.repeat(64)[:64] * torch.tensor([1.0, -1.0]).repeat(32)
    x[0, ::16] = fmt.max
    x[1] = 0.0
    x[2] *= 1e-3
    x[3, 5] = 300.0
    return x.bfloat16()


def nearest_scale(exact: float, fmt: Format) -> int:
    """Code of a scale that is not negative: nearest, ties to even, saturating."""
    return min(rounding.nearest_code(Fraction(float(exact)), fmt), fmt.max_code)


def codes_of(q: ops.Quantized) -> torch.Tensor:
    return elements(q.codes, q.shape[1], q.recipe)


@pytest.mark.parametrize(("name", "fmt"), [("nvfp4-e0m3", E0M3), ("nvfp4-int4", INT4)])
def test_elements_under_e4m3_scales(name: str, fmt: Format) -> None:
    x = samples(fmt)
    q = ops.quantize(x, name)
    assert q.recipe.element is fmt
    amax = f32(x.float().abs().max())
    encode = f32(fmt.max * 448) / amax
    for row in range(8):
        for block in range(4):
            part = x[row, 16 * block : 16 * block + 16].float().numpy()
            scale = nearest_scale(f32(np.abs(part).max()) * (encode * f32(1 / fmt.max)), E4M3)
            assert int(q.scales[row, block]) == scale
            with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
                factor = np.minimum(f32(1) / (f32(E4M3.value(scale)) * (f32(1) / encode)), np.finfo(f32).max)
                expected = [rounding.encode(float(number * factor), fmt) for number in part]
            assert codes_of(q)[row, 16 * block : 16 * block + 16].tolist() == expected
    decoded = ops.dequantize(q, torch.float32)
    values = torch.tensor(fmt.values)[codes_of(q).long()]
    scales = torch.tensor(E4M3.values)[q.scales.long()].repeat_interleave(16, 1)
    factor = (scales * q.amax) * torch.tensor(1 / (fmt.max * 448))
    assert torch.equal(decoded, values * factor)
    assert bool((codes_of(q) == fmt.max_code).any())


def test_elements_under_ue5m3_scales() -> None:
    x = samples(E2M1)
    x[4] *= 1e4
    x[5] *= 1e-5
    q = ops.quantize(x, "nvfp4-ue5m3")
    assert q.amax is None
    for row in range(8):
        for block in range(4):
            part = x[row, 16 * block : 16 * block + 16].float().numpy()
            scale = nearest_scale(f32(np.abs(part).max()) / f32(6), UE5M3)
            assert int(q.scales[row, block]) == scale
            value = f32(UE5M3.value(scale))
            expected = [rounding.encode(float(number / value), E2M1) if scale else 0 for number in part]
            assert codes_of(q)[row, 16 * block : 16 * block + 16].tolist() == expected
    assert int(q.scales[4].max()) > 0x7E > int(q.scales[5].min())


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8-e4m3", "mxfp6-e2m3"])
def test_blocks_of_16_under_e8m0(name: str) -> None:
    """A block of 16 has the codes and the scale of a block of 32 that has its elements twice."""
    recipe = find_recipe(f"{name}-1x16")
    assert recipe.block == (1, 16)
    assert recipe.scale is E8M0
    x = samples(recipe.element)
    q = ops.quantize(x, recipe)
    twice = ops.quantize(x.view(8, 4, 1, 16).expand(8, 4, 2, 16).reshape(8, 128), name)
    assert torch.equal(q.scales, twice.scales)
    assert torch.equal(codes_of(q), codes_of(twice).view(8, 4, 2, 16)[:, :, 0].reshape(8, 64))
    a, b = ops.quantize(x[:4], recipe), ops.quantize(x[4:], recipe)
    exact = ops.dequantize(a, torch.float32).double() @ ops.dequantize(b, torch.float32).double().T
    assert torch.equal(ops.gemm(a, b, out_dtype=torch.float32), exact.float())


NAMES = ["nvfp4-e0m3", "nvfp4-int4", "nvfp4-ue5m3", "mxfp4-1x16", "int4-g32", "int8-row"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inputs", ["normal", "ties", "position", "low-rows"])
def test_the_harness_judges_the_recipe(name: str, inputs: str) -> None:
    case = case_from_labels("quantize", name, (48, 64), "bf16", inputs)
    record = run_case(case, backend(quantize=ops.quantize, dequantize=ops.dequantize))
    assert (record.verdict, record.message) == ("pass", "")

    def wrong(x: torch.Tensor, recipe: object) -> ops.Quantized:
        q = ops.quantize(x, recipe)
        q.codes[17, 3] ^= 1
        return q

    record = run_case(case, backend(quantize=wrong))
    assert record.verdict == "fail"
    assert next(entry["stage"] for entry in record.stages if entry["sentence"]) == "codes"


@pytest.mark.parametrize("name", ["int4-g32", "int8-g32", "int8-row", "int4-row"])
def test_whole_numbers(name: str) -> None:
    """amax/max, in groups rounded to bfloat16, and the nearest whole number of x/s, ties to even."""
    x = samples(E2M1)
    q = ops.quantize(x, name)
    width, largest = min(64, q.recipe.block[1]), int(q.recipe.element.max)
    for row in range(8):
        for group in range(64 // width):
            part = x[row, width * group : width * (group + 1)].float()
            scale = f32(part.abs().max()) / f32(largest)
            scale = scale if q.recipe.spans_k else f32(torch.tensor(scale).bfloat16().float())
            assert f32(q.scales[row, group]) == scale
            quotients = [0.0 if scale == 0 else f32(number) / scale for number in part.numpy()]
            expected = [min(max(round(Fraction(float(n))), -largest - 1), largest) for n in quotients]
            codes = codes_of(q)[row, width * group : width * (group + 1)].tolist()
            assert codes == [number % q.recipe.element.codes for number in expected]
            values = ops.dequantize(q)[row, width * group : width * (group + 1)]
            assert values.tolist() == [float(f32(number) * scale) for number in expected]


def test_zero_points() -> None:
    """The range of a group and 0 in 15 steps; every number of a group is within a step of its element."""
    x = samples(E2M1)
    x[4], x[5] = x[4].abs() + 1, -x[5].abs() - 1
    q = ops.quantize(x, "int4-g32-zp")
    assert q.zeros is not None
    for row in range(8):
        for group in range(2):
            part = x[row, 32 * group : 32 * group + 32].float()
            least, most = min(float(part.min()), 0.0), max(float(part.max()), 0.0)
            scale = f32(torch.tensor((f32(most) - f32(least)) / f32(15)).bfloat16().float()) or f32(1)
            zero = min(round(Fraction(float(f32(-least) / scale))), 15)
            assert (f32(q.scales[row, group]), int(q.zeros[row, group])) == (scale, zero)
            sums = [f32(f32(number) / scale) + f32(zero) for number in part.numpy()]
            expected = [min(max(round(Fraction(float(number))), 0), 15) for number in sums]
            assert codes_of(q)[row, 32 * group : 32 * group + 32].tolist() == expected
            values = ops.dequantize(q)[row, 32 * group : 32 * group + 32]
            assert values.tolist() == [float(f32(number - zero) * scale) for number in expected]
    with pytest.raises(ValueError, match="zeros is None; recipe int4-g32-zp has a zero point for each scale"):
        ops.dequantize(replace(q, zeros=None))
