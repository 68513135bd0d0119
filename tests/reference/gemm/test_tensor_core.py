"""The simulated sum of a tensor core: plain against fractions, fast against plain, and judged bit for bit."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.gemm.fast import tensor_core_sum as fast
from narrowgauge.reference.gemm.fast.tensor_core_sum import fast_tensor_core_sum
from narrowgauge.reference.gemm.gemm import alpha, exact_product
from narrowgauge.reference.gemm.split_k import SplitK
from narrowgauge.reference.gemm.tensor_core import Factors, factors_of_operand, power_of_two, tensor_core_sum
from narrowgauge.reference.numbers import slabs
from narrowgauge.spec.formats import Format
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import summation
from tests.golden import bits
from tests.reference import kernels, narrow
from tests.reference.bounds.test_bounds import accepted, neighbour
from tests.reference.gemm.test_gemm_formats import BLOCK_PAIRS, pair

FP8 = ("fp8-current-e4m3", "fp8-current-e5m2")


def exponent(value: float, fmt: Format) -> int:
    """Exponent of a number of a format; a subnormal number has the exponent of the smallest normal number."""
    return max(math.frexp(value)[1] - 1, 1 - fmt.bias)


def accumulator(x: np.ndarray, y: np.ndarray, formats: tuple[Format, Format], fraction: int, width: int) -> float:
    """A single accumulator of the products of two rows of numbers, in fractions."""
    total = Fraction(0)
    for start in range(0, len(x), width):
        pairs = [(p, q) for p, q in zip(x[start : start + width], y[start : start + width], strict=True) if p * q]
        exponents = [exponent(p, formats[0]) + exponent(q, formats[1]) for p, q in pairs]
        if total:
            exponents.append(math.frexp(float(total))[1] - 1)
        if not exponents:
            continue
        unit = Fraction(2) ** (max(exponents) - fraction)
        terms = [Fraction(p) * Fraction(q) for p, q in pairs]
        total = sum((math.trunc(term / unit) * unit for term in [*terms, total]), Fraction(0))
        if total:
            last = Fraction(2) ** (math.frexp(float(total))[1] - 1 - min(fraction, 23))
            total = math.trunc(total / last) * last
    return float(total)


@pytest.mark.parametrize(
    ("order", "slices"),
    [
        ("split-2-aligned-13-32", [(0, 96), (96, 150)]),
        ("split-9-aligned-13-32", [(0, 32), (32, 64), (64, 96), (96, 128), (128, 150)]),
        ("split-2-aligned-25-16-16", [(0, 80), (80, 150)]),
        ("split-2-decoded-aligned-13-16", [(0, 80), (80, 150)]),
        ("split-at-33-90-aligned-13-32", [(0, 64), (64, 96), (96, 150)]),
        ("split-at-32-96-999-aligned-13-16-32", [(0, 32), (32, 96), (96, 150)]),
    ],
)
def test_slices_of_k_are_summed_apart_and_added(order: str, slices: list[tuple[int, int]]) -> None:
    a, b = pair(FP8, 11, (24, 24, 150), "one", "any")
    model, exact = summation(order).aligned, exact_product(a, b).high
    split = SplitK.of(summation(order), torch.float32)
    assert model is not None
    factors = factors_of_operand(a), factors_of_operand(b)
    total = torch.zeros(24, 24)
    for columns in slices:
        total += tensor_core_sum(*(side.columns(slice(*columns)) for side in factors), model, exact).float()
    found = tensor_core_sum(*factors, model, exact, split=split).float()
    assert torch.equal(found, total)
    if isinstance(split.slices, int):
        assert torch.equal(fast.FewOutputs(*factors, model).sums(split.slices, model.promoted), total)
    assert not torch.equal(found, tensor_core_sum(*factors, model, exact).float())
    assert torch.equal(bounds(a, b, out_dtype=torch.float32, order=order).expected, alpha(a, b) * total)


def test_slices_joined_as_a_tree_in_the_output_dtype() -> None:
    a, b = pair(FP8, 12, (24, 24, 256), "one", "data")
    order = "split-5-aligned-25-16-tree-out"
    limits = bounds(a, b, out_dtype=torch.bfloat16, order=order)
    model, exact = summation(order).aligned, exact_product(a, b).high
    assert model is not None
    factors = factors_of_operand(a), factors_of_operand(b)
    cuts = [slice(start, start + 64) for start in range(0, 256, 64)]  # ⌈16 steps / 5⌉ steps: the fifth slice is empty
    x = [tensor_core_sum(*(side.columns(cut) for side in factors), model, exact).bfloat16() for cut in cuts]
    assert torch.equal(limits.expected, (alpha(a, b) * ((x[0] + x[1]) + (x[2] + x[3])).float()).bfloat16())
    assert accepted(limits, limits.expected).all()
    for other in (order.removesuffix("-out"), order.replace("-tree", ""), "aligned-25-16"):
        assert not accepted(limits, bounds(a, b, out_dtype=torch.bfloat16, order=other).expected).all(), other


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["any", "data", "sparse"])
@pytest.mark.parametrize(("fraction", "width", "promoted"), [(13, 32, None), (13, 32, 64), (25, 16, None), (10, 8, 8)])
def test_the_simulation_agrees_with_fractions(family: str, fraction: int, width: int, promoted: int | None) -> None:
    a, b = pair(FP8, 1, (4, 4, 150), "one", family)
    name = f"aligned-{fraction}-{width}" + (f"-{promoted}" if promoted else "")
    limits = bounds(a, b, out_dtype=torch.float32, order=name)
    model, exact = summation(name).aligned, exact_product(a, b).high
    assert model is not None
    plain = tensor_core_sum(factors_of_operand(a), factors_of_operand(b), model, exact)
    formats = a.recipe.element, b.recipe.element
    left, right = narrow.elements(a), narrow.elements(b)
    for i, j in np.ndindex(4, 4):
        total = np.float32(0)
        for start in range(0, 150, promoted or 150):
            here = slice(start, start + (promoted or 150))
            total += np.float32(accumulator(left[i, here], right[j, here], formats, fraction, width))
        assert plain[i, j] == total
        assert limits.expected[i, j] == alpha(a, b).numpy()[0, 0] * total
    assert limits.exact.all()
    assert (limits.tier == 1).all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("order", ["aligned-25-16", "aligned-13-32-64", "split-2-aligned-13-8-16"])
@pytest.mark.parametrize("names", [("mxfp4", "mxfp4"), ("mxfp8-e4m3", "mxfp6-e2m3"), FP8], ids="-".join)
def test_the_fast_sum_equals_the_plain_sum(names: tuple[str, str], order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether no sum is truncated, only selected sums are aligned, or all, in groups of any size."""
    shares = []
    for seed, (kind, family) in enumerate(
        [("equal", "lattice"), ("near", "data"), ("wide", "sparse"), ("wide", "any")]
    ):
        a, b = pair(names, seed, (15, 20, 100), "one" if names == FP8 else kind, family)
        model, split = summation(order).aligned, SplitK.of(summation(order), torch.float32)
        assert model is not None
        factors, exact = (factors_of_operand(a), factors_of_operand(b)), exact_product(a, b).high
        shares.append(float(fast._never_truncated(*factors, model).double().mean()))
        plain = bits(tensor_core_sum(*factors, model, exact, split=split).float())
        assert torch.equal(bits(fast_tensor_core_sum(*factors, model, exact, split=split).float()), plain)
        for few, many, checked_blocks, slab in (
            (1.0, 1.0, 1, 1 << 10), (1.0, 1.0, 3, 1 << 10), (-1.0, 1.0, 3, 1 << 10), (-1.0, -1.0, 1, 1 << 10),
            (0.1, 0.1, 2, 1 << 10), (-1.0, 1.0, 8, 1 << 18),
        ):  # fmt: skip
            with monkeypatch.context() as patched:
                patched.setitem(slabs.SLAB_ELEMENTS, "cpu", slab)
                patched.setattr(fast, "_FEW", few)
                patched.setattr(fast, "_MANY", many)
                patched.setattr(fast, "_CHECKED_BLOCKS", checked_blocks)
                patched.setattr(fast, "_SKIPPED_CHECKS", 2)
                patched.setattr(fast, "_never_truncated", lambda *_: torch.zeros(15, 20).bool())
                simulated = fast_tensor_core_sum(*factors, model, exact, split=split)
                assert torch.equal(bits(simulated.float()), plain)
    assert max(shares) == 1
    assert min(shares) < 1


@pytest.mark.parametrize(("precision", "by_matmul"), [("highest", True), ("medium", False)])
def test_sums_do_not_depend_on_float32_matmuls(
    precision: str, by_matmul: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "medium", a float32 matrix product may round its factors to bfloat16."""
    a, b = pair(FP8, 11, (24, 24, 150), "one", "data")
    model, exact = summation("aligned-13-32").aligned, exact_product(a, b).high
    assert model is not None
    factors, used = (factors_of_operand(a), factors_of_operand(b)), []
    real, before = fast._sums_by_matmul, torch.get_float32_matmul_precision()
    monkeypatch.setattr(fast, "_sums_by_matmul", lambda device: (used.append(real(device)), real(device))[1])
    torch.set_float32_matmul_precision(precision)
    try:
        found = fast_tensor_core_sum(*factors, model, exact)
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(used) == {by_matmul}
    assert torch.equal(bits(found.float()), bits(tensor_core_sum(*factors, model, exact).float()))


@pytest.mark.parametrize("width", [1, 16, 64])
@pytest.mark.parametrize("lowest", [0, -8, -62])
def test_a_matmul_finds_the_largest_power_of_products(width: int, lowest: int) -> None:
    """As a comparison of all products does, for equal powers, for few nonzero powers and for zeros alone."""
    draws = torch.Generator().manual_seed(width)
    sides = []
    for rows in (17, 33):
        exponents = torch.randint(lowest, 1, (rows, width), generator=draws)
        powers = torch.exp2((exponents + 50 * torch.arange(rows).remainder(3).unsqueeze(1)).double())
        powers *= torch.rand(rows, width, generator=draws) < torch.linspace(0, 1.2, rows).unsqueeze(1)
        sides.append(Factors(powers, powers))
    x, y = (fast._BlockedFactors.of(side, width) for side in sides)
    assert fast._matmul_finds_largest(x, y)
    largest = fast._largest_products(x, y, slice(0, width), by_matmul=True)
    assert torch.equal(largest, fast._largest_products(x, y, slice(0, width), by_matmul=False))
    assert torch.equal(largest, (sides[0].powers.unsqueeze(1) * sides[1].powers).amax(2))
    assert (largest == 0).any()


def test_scales_of_blocks_are_part_of_the_products() -> None:
    a, b = pair(("mxfp8-e4m3", "mxfp6-e3m2"), 2, (3, 3, 96), "near", "data")
    limits = bounds(a, b, out_dtype=torch.float32, order="aligned-25-1")
    left, right = narrow.values(a), narrow.values(b)
    for i, j in np.ndindex(3, 3):
        wide = Format("wide", 16, 8, 3, bias=300, max_code=1)  # no scaled element is subnormal
        formats = (wide, wide)
        assert limits.expected[i, j] == accumulator(left[i], right[j], formats, 25, 1)


def products(left: list[float], right: list[float]) -> tuple[Quantized, Quantized]:
    """An output of products of E4M3 numbers in the columns, with scales of 1."""
    recipe = find_recipe("fp8-current-e4m3")
    code = {recipe.element.value(code): code for code in range(recipe.element.max_code + 1)}
    codes = (torch.tensor([[code[number] for number in row]], dtype=torch.uint8) for row in (left, right))
    a, b = (Quantized(row, torch.ones(1), None, recipe, tuple(row.shape)) for row in codes)
    return a, b


@pytest.mark.parametrize(("large", "kept"), [(2.0**13, True), (2.0**14, False)])
def test_what_is_below_the_last_bit_of_the_largest_is_lost(large: float, kept: bool) -> None:
    a, b = products([2.0**7, 1.0], [large / 2.0**7, 1.0])
    limits = bounds(a, b, out_dtype=torch.float32, order="aligned-13-32")
    assert limits.expected == large + (1 if kept else 0)
    right = bounds(a, b, out_dtype=torch.float32)
    assert right.exact
    assert bool(accepted(right, limits.expected)) == kept
    for direction in (-math.inf, math.inf):
        assert not accepted(limits, neighbour(limits.expected, direction))


def test_bits_of_separate_blocks_are_truncated_later() -> None:
    """A sum of the first eight blocks may lose bits, so the next blocks are checked separately."""
    left, right = ([0.0] * 513 for _ in range(2))
    pairs = {0: (448.0, 448.0), 1: (448.0, 448.0), 2: (2.0**-9, 1.0), 128: (1.5 * 2.0**-6, 2.0**-8), 512: (32.0, 32.0)}
    for column, (x, y) in pairs.items():
        left[column], right[column] = x, y
    a, b = products(left, right)
    a.codes[0, 1] |= a.recipe.element.sign_code
    assert bounds(a, b, out_dtype=torch.float32, order="aligned-25-16").expected == 1024 + 2.0**-9


def test_the_bits_of_another_model_are_rejected() -> None:
    a, b = pair(FP8, 3, (6, 6, 300), "one", "data")
    limits = bounds(a, b, out_dtype=torch.float32, order="aligned-13-32")
    for other in (
        "aligned-12-32", "aligned-14-32", "aligned-13-16", "aligned-13-32-128", "split-2-aligned-13-32", None
    ):  # fmt: skip
        out = bounds(a, b, out_dtype=torch.float32, order=other).expected
        assert not accepted(limits, out).all(), other
    assert accepted(limits, limits.expected).all()


@pytest.mark.parametrize(("order", "slices"), [("aligned-13-32", [5]), ("split-2-aligned-13-32", [3, 5])])
def test_blocks_are_promoted_to_what_the_tensor_core_gave(order: str, slices: list[int]) -> None:
    a, b = pair(BLOCK_PAIRS[0], 4, (4, 5, 600), "near", "data")
    limits = bounds(a, b, out_dtype=torch.float32, order=order)
    assert limits.exact.all()
    assert (limits.tier == 1).all()
    formats = a.recipe.element, b.recipe.element
    left, right = narrow.elements(a), narrow.elements(b)
    s_a, s_b = (narrow.factors(q).astype(np.float32) for q in (a, b))
    total, y = np.zeros((4, 5), np.float32), np.zeros((4, 5), np.float32)
    for number, block in enumerate(kernels.blocks_of(a), 1):
        p = np.array([[accumulator(x[block], z[block], formats, 13, 32) for z in right] for x in left], np.float32)
        y = kernels.fma(p * s_a[:, block.start, None], s_b[None, :, block.start], y)
        if number in slices:
            total, y = total + y, np.zeros_like(y)
    np.testing.assert_array_equal(limits.expected.numpy(), total)
    assert not accepted(limits, bounds(a, b, out_dtype=torch.float32).expected).all()
    unsplit = bounds(a, b, out_dtype=torch.float32, order="aligned-13-32")
    assert torch.equal(unsplit.expected, limits.expected) == (len(slices) == 1)


@pytest.mark.parametrize(
    ("scales", "order", "in_float32"),
    [
        ((1.0, 1.0), "aligned-13-32", True),
        ((2.0**-10, 1.0), "aligned-10-16-32", True),
        ((2.0**-15, 1.0), "aligned-13-32", False),  # products from 2^-30 to 2^9
        ((1.0, 2.0**41), "aligned-13-32", False),
        ((1.0, 1.0 + 2.0**-12), "aligned-13-32", False),  # 13 bits
        ((1.0, 1.0), "aligned-13-64", False),
        ((1.0, 1.0), "aligned-25-16", False),
    ],
)
def test_many_sums_are_aligned_in_float32_only_with_equal_bits(
    scales: tuple[float, float], order: str, in_float32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(4)
    factors = []
    for rows in (9, 12):
        values = torch.randn(rows, 160, generator=generator).mul(8).round().double()  # up to 7 bits
        values = values.where(torch.rand(values.shape, generator=generator) < 0.9, values * scales[1])
        values[:, ::40] = scales[0]
        values[:3, 64:128] = 0
        factors.append(Factors(values, power_of_two(values)))
    model = summation(order).aligned
    assert model is not None
    x, y = (fast._BlockedFactors.of(side, model.width) for side in factors)
    assert fast._aligned_in_float32(x, y, model) is in_float32
    monkeypatch.setattr(fast, "_FEW", -1.0)
    monkeypatch.setattr(fast, "_MANY", -1.0)
    exact = factors[0].values @ factors[1].values.T
    found = fast_tensor_core_sum(*factors, model, exact)
    assert torch.equal(bits(found.float()), bits(tensor_core_sum(*factors, model, exact).float()))
