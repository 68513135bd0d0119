"""Bounds of operands that are decoded first: every kernel of the declaration is inside, by exact arithmetic."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.reference import ops
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.bounds.decoded_first import DTYPES, decoded, tensor_factor
from narrowgauge.reference.gemm.operands import element_values, scale_values
from narrowgauge.reference.quantize.scaling import used_tensor_scale
from narrowgauge.spec.summation import OPERANDS, Summation

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
RECIPES = [
    "nvfp4",
    "nvfp4@torchao",
    "nvfp4-rowscaled",
    "mxfp8-e4m3",
    "mxfp4",
    "fp8-current-e4m3",
    "fp8-block-1x128-e4m3-fp32",
]


def operands(recipe, rows=5, columns=160, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [ops.quantize((size * torch.randn(rows, columns, generator=generator)).bfloat16(), recipe) for _ in range(2)]


def decodings(q):
    """float32 values (M, K) in every order of multiplications that a kernel may take."""
    elements = element_values(q).float()
    scales = scale_values(q).float()
    scales = scales.expand(-1, q.shape[1]) if q.recipe.whole else scales.repeat_interleave(q.recipe.block[1], 1)
    scales = scales[:, : q.shape[1]]
    if q.recipe.alpha in ("1", "s_a*s_b"):
        yield elements * scales
        return
    if q.recipe.alpha in ("1/(a_enc*b_enc)", "a_dec*b_dec"):
        scale = used_tensor_scale(q).unsqueeze(1)
        factors = [scale if q.recipe.alpha == "a_dec*b_dec" else 1 / scale]
    else:
        amax, d = q.amax.unsqueeze(1), torch.tensor(q.recipe.max_product)
        factors = [amax / d, amax * (1 / d), 1 / (d / amax), amax / 448 / 6, amax * (1 / torch.tensor(448.0)) / 6]
        yield elements * (scales * amax * (1 / d))
    for factor in factors:
        yield elements * scales * factor
        yield elements * (scales * factor)
        yield elements * factor * scales


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("size", [1.0, 2.0**-118, 2.0**-113, 2.0**-108, 2.0**100])
def test_every_decoding_lies_within_the_radius(recipe, name, size):
    a, _ = operands(recipe, size=size)
    interval = decoded(a, tensor_factor(a), DTYPES[name])
    assert not bool(interval.unknown.any())
    for value in decodings(a):
        distance = (value.to(DTYPES[name]).double() - interval.centre).abs()
        assert bool((distance <= interval.radius).all())
    if recipe in ("mxfp8-e4m3", "mxfp4", "fp8-current-e4m3", "fp8-block-1x128-e4m3-fp32"):
        assert not interval.radius.any()  # a single rounding of two known factors


def float32(x):
    """A Fraction rounded to float32, by comparison with the neighbours in exact arithmetic."""
    near = np.float32(float(x))
    around = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    return min(around, key=lambda y: (abs(Fraction(float(y)) - x), int(y.view(np.int32)) & 1))


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8-e4m3", "fp8-current-e4m3"])
@pytest.mark.parametrize("name", OPERANDS)
def test_sums_in_any_tree_with_and_without_fma_are_inside(recipe, name):
    a, b = operands(recipe, rows=2, columns=48)
    limits = bounds(a, b, out_dtype=F32, order=Summation(operands=name))
    generator = np.random.default_rng(1)
    for x, w in zip(decodings(a), decodings(b), strict=True):
        x, w = x.to(DTYPES[name]).double().numpy(), w.to(DTYPES[name]).double().numpy()  # noqa: PLW2901
        for fused in (True, False):
            for row in range(2):
                for column in range(2):
                    terms = [Fraction(p) * Fraction(q) for p, q in zip(x[row], w[column], strict=True)]
                    if fused:
                        y = np.float32(0)
                        for k in generator.permutation(len(terms)):
                            y = float32(Fraction(float(y)) + terms[k])
                    else:
                        nodes = [float32(term) for term in terms]
                        while len(nodes) > 1:
                            i, j = sorted(generator.choice(len(nodes), 2, replace=False))
                            second, first = nodes.pop(j), nodes.pop(i)
                            nodes.append(float32(Fraction(float(first)) + Fraction(float(second))))
                        y = nodes[0]
                    assert float(limits.lower[row, column]) <= float(y) <= float(limits.upper[row, column])


def test_products_that_cannot_round_have_one_correct_output():
    """Powers of two as elements and scales: the bits must be equal, and the next number is wrong."""
    a, b = (ops.quantize(torch.tensor([[1.0, -2.0, 4.0, 0.5] * 8] * 3), "mxfp8-e4m3") for _ in range(2))
    for name in OPERANDS:
        limits = bounds(a, b, out_dtype=F32, order=Summation(operands=name))
        assert bool(limits.exact.all())
        output = ops.gemm(a, b, out_dtype=F32)
        assert bool(within_bounds(output, limits).all())
        assert not bool(within_bounds(torch.nextafter(output, torch.full_like(output, torch.inf)), limits).any())


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-current-e4m3", "fp8-block-1x128-e4m3-fp32"])
def test_a_declaration_is_no_tolerance(recipe):
    """A kernel with declared operands passes; undeclared, with a wrong dtype or a wrong column the stage fails."""
    a, b = operands(recipe, rows=24, columns=256, seed=3)
    x, w = (ops.dequantize(q, BF16).float() for q in (a, b))
    generator = torch.Generator().manual_seed(4)
    c, bias = torch.randn(24, 24, generator=generator), torch.randn(24, generator=generator)
    wrong = x.clone()
    wrong[:, -1] = 0
    for out in (F32, BF16, F16):
        for addends in ({}, {"c": c.to(out)}, {"bias": bias.to(out)}, {"c": c.to(out), "bias": bias.to(out)}):

            def product(x, out=out, addends=addends):
                y = x @ w.T
                if recipe.startswith("fp8-block"):
                    y = (y + addends["bias"].float() if "bias" in addends else y).to(out)
                    return (y.float() + addends["c"].float()).to(out) if "c" in addends else y
                for addend in ("c", "bias"):
                    y = y + addends[addend].float() if addend in addends else y
                return y.to(out)

            def correct(output, operands, out=out, addends=addends):
                limits = bounds(a, b, out_dtype=out, order=Summation(operands=operands), **addends)
                return within_bounds(output, limits)

            assert bool(correct(product(x), "decoded-bfloat16").all())
            assert not bool(correct(product(x), None).all())
            assert not bool(correct(product(x), "decoded-float32").all())
            assert not bool(correct(product(wrong), "decoded-bfloat16").all())


def test_overflow_and_nan_of_decoded_numbers():
    """448·2^127 overflows as a decoded number, and its product with 0 is NaN, as in every kernel that decodes first."""
    a, b = (ops.quantize(torch.ones(2, 64).bfloat16(), "mxfp8-e4m3") for _ in range(2))
    a = replace(a, codes=a.codes.clone().fill_(0x7E), scales=torch.full_like(a.scales, 254))
    b.codes[1] = 0
    x, w = ops.dequantize(a), ops.dequantize(b)
    assert bool(x.isinf().all())
    y = x @ w.T
    assert bool(y[:, 0].isinf().all())
    assert bool(y[:, 1].isnan().all())
    limits = bounds(a, b, out_dtype=F32, order=Summation(operands="decoded-float32"))
    assert bool(within_bounds(y, limits).all())
    assert not bool(within_bounds(torch.zeros_like(y), limits).any())
    b = replace(b, scales=torch.full_like(b.scales, 100))  # no sum overflows
    y = x @ ops.dequantize(b).T
    undeclared = bounds(a, b, out_dtype=F32)
    assert bool(within_bounds(y, undeclared).all())
    for column, value in ((0, -torch.inf), (1, 0.0), (1, torch.inf)):  # all outputs are of decoded operands, or none
        changed = y.clone()
        changed[0, column] = value
        assert not bool(within_bounds(changed, undeclared).all())


@pytest.mark.parametrize(
    ("declared", "words"),
    [({"operands": "decoded-fp32"}, "decoded-float32"), ({"operands": OPERANDS[0], "order": "tree"}, "not both")],
)
def test_refused_declarations(declared, words):
    with pytest.raises(ValueError, match=words):
        Summation(**declared)
