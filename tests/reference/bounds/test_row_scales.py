"""Bounds of a GEMM whose operands have a float32 scale per row: every order of the two products is inside."""

from __future__ import annotations

import itertools

import pytest
import torch

from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.ops import dequantize, gemm, quantize
from narrowgauge.spec.quantized import Quantized

PAIRS = [
    ("fp8-row-e4m3", "fp8-row-e4m3"),
    ("fp8-row-e4m3@torchao-affine", "fp8-current-e4m3@torchao-affine"),
    ("fp8-row-e4m3-pow2", "fp8-row-e5m2-pow2"),
    ("fp8-row-e4m3fnuz", "fp8-row-e5m2fnuz"),
]
ORDERS = (
    lambda acc, a, b: (acc * a) * b,
    lambda acc, a, b: (acc * b) * a,
    lambda acc, a, b: acc * (a * b),
)


def operands(names: tuple[str, str], amplitude: float, columns: int) -> tuple[Quantized, Quantized]:
    generator = torch.Generator().manual_seed(columns)
    a = torch.randn(9, columns, generator=generator) * amplitude
    b = torch.randn(7, columns, generator=generator) * amplitude * 3.0 ** -torch.arange(7).view(-1, 1)
    return quantize(a, names[0]), quantize(b, names[1])


def sums(a: Quantized, b: Quantized, seed: int) -> torch.Tensor:
    """float32 sums of the products of elements, added in a random order."""
    left, right = (torch.tensor(q.recipe.element.values)[q.codes.int()] for q in (a, b))
    total = torch.zeros(len(left), len(right))
    for k in torch.randperm(left.shape[1], generator=torch.Generator().manual_seed(seed)):
        total = total + left[:, k : k + 1] * right[:, k : k + 1].T
    return total


@pytest.mark.sampled(4)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("amplitude", [1.0, 1e-18, 1e-22, 1e18])
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_every_order_of_sums_and_scales_is_inside(
    names: tuple[str, str], amplitude: float, out_dtype: torch.dtype
) -> None:
    for columns, addend in itertools.product((1, 16, 150), (None, amplitude**2)):
        a, b = operands(names, amplitude, columns)
        c = None if addend is None else torch.linspace(-3, 3, 63).view(9, 7) * addend
        accepted = bounds(a, b, out_dtype=out_dtype, c=c)
        for seed, scaled in enumerate(ORDERS):
            y = scaled(sums(a, b, seed), a.scales, b.scales.view(1, -1))
            y = (y if c is None else y + c).to(out_dtype)
            inside = (y >= accepted.lower) & (y <= accepted.upper) | accepted.undetermined & ~y.isfinite()
            assert inside.all()
            equal = (y == accepted.expected) | (y == accepted.fused) | accepted.zero_sum
            assert (equal | ~accepted.exact).all()


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_the_reference_is_inside_and_other_scales_are_outside(names: tuple[str, str]) -> None:
    a, b = operands(names, 1.0, 150)
    accepted = bounds(a, b, out_dtype=torch.float32)
    y = gemm(a, b, out_dtype=torch.float32)
    assert ((y >= accepted.lower) & (y <= accepted.upper)).all()
    exact = dequantize(a).double() @ dequantize(b).double().T
    assert ((y - exact).abs() <= 1e-5 * (dequantize(a).double().abs() @ dequantize(b).double().abs().T)).all()
    for wrong in (y * (1 + 2.0**-14), sums(a, b, 0) * (2 * a.scales) * b.scales.view(1, -1)):
        assert not ((wrong >= accepted.lower) & (wrong <= accepted.upper)).all()
