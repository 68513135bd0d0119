"""Declarations about sums: a kernel that follows its declaration is accepted, a violation is rejected."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.gemm.gemm import alpha
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import Summation
from tests.reference import adders, kernels, narrow
from tests.reference.adders import Adder
from tests.reference.bounds.test_bounds import accepted, neighbour, ordinal
from tests.reference.gemm.test_gemm_formats import BLOCK_PAIRS, pair
from tests.reference.samples import operands, quantized

ORDERS = ["sequential", "blocks", "tree", "split-2", "split-3", "split-4-tree"]
UNITS = [Adder(), Adder(truncates=True), Adder(flushes=True), Adder(truncates=True, flushes=True)]
UNIT_IDS = ["nearest", "truncating", "flushing", "truncating and flushing"]
every_order = pytest.mark.parametrize("order", ORDERS)
every_unit = pytest.mark.parametrize("unit", UNITS, ids=UNIT_IDS)
E4M3 = ("mxfp8-e4m3", "mxfp8-e4m3")


def nvfp4(seed: int, shape: tuple[int, int, int], family: str) -> tuple[Quantized, Quantized]:
    left, left_scales, right, right_scales = operands(family, np.random.default_rng(seed), *shape)
    return quantized(left, left_scales), quantized(right, right_scales)


def problems() -> list[tuple[str, Quantized, Quantized]]:
    """Operands with every kind of scale, with sums that round, cancel or underflow."""
    found = [(f"nvfp4 {family}", *nvfp4(1, (3, 4, 80), family)) for family in ("wide", "cancel", "positive", "sparse")]
    for names in (E4M3, ("mxfp8-e5m2", "mxfp6-e3m2"), ("mxfp4", "mxfp4")):
        for kind, family in (("near", "data"), ("wide", "any"), ("small", "sparse"), ("small", "positive")):
            found.append((f"{names[0]} {kind} {family}", *pair(names, 2, (3, 4, 150), kind, family)))
    for family in ("data", "positive"):
        found.append((f"fp8 {family}", *pair(("fp8-current-e4m3", "fp8-current-e5m2"), 3, (3, 4, 75), "one", family)))
    return found


PROBLEMS = problems()


def declared(order: str | None, unit: Adder) -> Summation:
    return Summation(order, truncates=unit.truncates, flushes=unit.flushes)


def output(a: Quantized, b: Quantized, sums: np.ndarray, unit: Adder) -> torch.Tensor:
    """α times sums, in float32; α rounds to nearest whatever the accumulator does."""
    product = alpha(a, b).numpy() * sums
    return torch.from_numpy(replace(unit, truncates=False).flushed(product))


# Sound.


@pytest.mark.sampled(14)
@every_unit
@every_order
def test_a_declared_order_does_not_leave_its_bounds(order: str, unit: Adder) -> None:
    for name, a, b in PROBLEMS:
        limits = bounds(a, b, out_dtype=torch.float32, order=declared(order, unit))
        out = output(a, b, adders.in_order(order, a, b, unit), unit)
        assert accepted(limits, out).all(), name
        assert ((out.double() - limits.centre).abs() <= limits.budget)[out.isfinite()].all(), name
        assert accepted(limits, limits.expected).all()


@pytest.mark.sampled(4)
@every_unit
def test_no_order_of_a_unit_leaves_the_bounds_of_any(unit: Adder) -> None:
    """Every declared order and 60 random trees of each problem."""
    rng = np.random.default_rng(7)
    for name, a, b in PROBLEMS:
        limits = bounds(a, b, out_dtype=torch.float32, order=declared(None, unit))
        for order in ORDERS:
            assert accepted(limits, output(a, b, adders.in_order(order, a, b, unit), unit)).all(), (name, order)
        trees = adders.in_trees(adders.scaled_terms(a, b, unit), unit, rng, 60)
        assert accepted(limits, output(a, b, trees, unit)).all(), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("truncates", [False, True])
@every_order
def test_promoted_sums_keep_to_their_order(order: str, truncates: bool) -> None:
    """P in the declared order, y = fma(fl(P·s_a), s_b, y) to nearest; slices are added in order."""
    unit = Adder(truncates=truncates)
    for seed, kind in enumerate(("near", "pow2", "small")):
        a, b = pair(BLOCK_PAIRS[0], seed, (3, 4, 600), kind, "data")
        limits = bounds(a, b, out_dtype=torch.float32, order=declared(order, unit))
        terms = kernels.code_terms(a, b)
        s_a, s_b = (narrow.factors(q).astype(np.float32) for q in (a, b))
        blocks = kernels.blocks_of(a)
        slices = int(order.split("-")[1]) if order.startswith("split") else 1
        each = -(-len(blocks) // slices)
        sums = []
        for first in range(0, len(blocks), each):
            y = np.zeros((3, 4), np.float32)
            for block in blocks[first : first + each]:
                inner = (adders.in_pairs if order == "tree" else adders.in_turn)(terms[:, :, block], unit)
                y = kernels.fma(inner * s_a[:, block.start, None], s_b[None, :, block.start], y)
            sums.append(y)
        join = adders.in_pairs if order.endswith("-tree") else adders.in_turn
        total = join(np.stack(sums, axis=2), Adder())
        assert accepted(limits, torch.from_numpy(total)).all(), kind
        assert accepted(limits, limits.expected).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", [None, "blocks", "tree", "split-2"])
def test_flushed_promoted_sums_stay_in_their_bounds(order: str | None) -> None:
    """Scales, P·s_a and y below 2^-126, of either sign."""
    unit = Adder(flushes=True)
    vanished = 0
    for seed in range(6):
        a, b = pair(BLOCK_PAIRS[0], seed, (4, 5, 300), "small", "data")
        limits = bounds(a, b, out_dtype=torch.float32, order=declared(order, unit))
        terms = kernels.code_terms(a, b)
        s_a, s_b = (unit.flushed(narrow.factors(q).astype(np.float32)) for q in (a, b))
        ys = []
        blocks = kernels.blocks_of(a)
        half = 2 if order == "split-2" else len(blocks)
        for first in range(0, len(blocks), half):
            y = np.zeros((4, 5), np.float32)
            for block in blocks[first : first + half]:
                inner = (adders.in_pairs if order == "tree" else adders.in_turn)(terms[:, :, block], unit)
                t = unit.flushed(inner * s_a[:, block.start, None])
                y = unit.flushed(kernels.fma(t, s_b[None, :, block.start], y))
            ys.append(y)
        out = torch.from_numpy(adders.in_turn(np.stack(ys, axis=2), unit))
        assert accepted(limits, out).all(), seed
        vanished += int(((out == 0) & (limits.expected != 0)).sum())
    assert vanished


@pytest.mark.parametrize("epilogue", ["", "c", "bias", "c and bias"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_an_output_may_be_flushed_at_every_step(epilogue: str, out_dtype: torch.dtype) -> None:
    """α subnormal or not, sums, c and bias on both sides of 2^-126, exact sums included."""
    unit, rng = Adder(flushes=True), np.random.default_rng(5)
    vanished = 0
    for amax, family in itertools.product((2688.0 * 2.0**-70, 2688.0 * 2.0**-66), ("randn", "lattice", "wide")):
        left, left_scales, right, right_scales = operands(family, rng, 6, 7, 48)
        a, b = quantized(left, left_scales, amax), quantized(right, right_scales, amax)
        added = {
            name: torch.from_numpy((rng.standard_normal(shape) * 2.0**-126).astype(np.float32))
            for name, shape in (("c", (6, 7)), ("bias", (7,)))
            if name in epilogue
        }
        limits = bounds(a, b, out_dtype=out_dtype, order=declared(None, unit), **added)
        sums = kernels.in_turn(adders.scaled_terms(a, b, unit))
        out = unit.flushed(unit.flushed(alpha(a, b).numpy()) * sums)
        for addend in added.values():
            out = unit.add(out, np.broadcast_to(addend.numpy(), out.shape))
        cast = torch.from_numpy(out).to(out_dtype)
        assert accepted(limits, cast).all(), (amax, family)
        assert ((cast.double() - limits.centre).abs() <= limits.budget).all()
        assert accepted(limits, limits.expected).all()
        strict = bounds(a, b, out_dtype=out_dtype, **added)
        vanished += int((~accepted(strict, cast)).sum())
    assert vanished  # else this would show nothing


# Sharp.


@pytest.mark.sampled(12)
@every_unit
@every_order
def test_the_neighbours_of_the_interval_are_rejected(order: str, unit: Adder) -> None:
    for name, a, b in PROBLEMS:
        limits = bounds(a, b, out_dtype=torch.float32, order=declared(order, unit))
        for end, direction in ((limits.lower, -math.inf), (limits.upper, math.inf)):
            outside = neighbour(torch.where(limits.exact, limits.expected, end), direction)
            wrong = ~limits.zero_sum | ~limits.exact
            assert not accepted(limits, outside)[wrong & outside.isfinite()].any(), name


def test_a_declared_order_is_narrower_and_truncation_wider() -> None:
    a, b = nvfp4(3, (6, 6, 1024), "wide")
    unit = bounds(a, b, out_dtype=torch.float32)
    for order in ORDERS:
        limits, wider = (
            bounds(a, b, out_dtype=torch.float32, order=Summation(order, truncates=truncates))
            for truncates in (False, True)
        )
        widths = [(ordinal(one.upper) - ordinal(one.lower)).double().mean() for one in (unit, limits, wider)]
        assert widths[1] < widths[0] / 4
        assert 1.5 * widths[1] < widths[2] < 2.5 * widths[1]


# Each declaration has a witness.


def powers(exponents: list[int], code: int = 0x38) -> tuple[Quantized, Quantized]:
    """Operands of a single output; its terms are `code` (1) times 2^e, a term per block."""
    codes = torch.zeros(1, 32 * len(exponents), dtype=torch.uint8)
    codes[0, ::32] = code
    scales = torch.tensor([[127 + e for e in exponents]], dtype=torch.uint8)
    ones, plain = torch.full_like(codes, 0x38), torch.full_like(scales, 127)
    shape = (1, codes.shape[1])
    return tuple(Quantized(x, s, None, find_recipe("mxfp8-e4m3"), shape) for x, s in ((codes, scales), (ones, plain)))  # type: ignore[return-value]


@pytest.mark.parametrize("order", [None, "sequential", "blocks"])
def test_truncation_is_right_only_where_it_is_declared(order: str | None) -> None:
    """2^24 and 64 times 1.75, which truncation loses."""
    a, b = powers([24] + [0] * 64, code=0x3E)
    a.codes[0, 0] = 0x38
    lost = torch.tensor([[2.0**24]])
    assert adders.in_order("blocks", a, b, Adder(truncates=True)) == lost.numpy()
    assert not accepted(bounds(a, b, out_dtype=torch.float32, order=order), lost)
    assert accepted(bounds(a, b, out_dtype=torch.float32, order=Summation(order, truncates=True)), lost)


@pytest.mark.parametrize("order", [None, "sequential", "blocks", "tree", "split-2"])
def test_a_flushed_sum_is_right_only_where_it_is_declared(order: str | None) -> None:
    a, b = powers([-100, -110])
    b.scales -= 30
    zero, beyond = torch.zeros(1, 1), torch.tensor([[2.0**-124]])
    strict = bounds(a, b, out_dtype=torch.float32, order=order)
    flushed = bounds(a, b, out_dtype=torch.float32, order=Summation(order, flushes=True))
    assert strict.exact
    assert (strict.tier == 0).all()
    assert not accepted(strict, zero)
    assert not flushed.exact
    assert (flushed.tier != 0).all()
    assert accepted(flushed, zero)
    assert not accepted(flushed, beyond)
    assert not accepted(flushed, -beyond)


@pytest.mark.parametrize("order", [None, *ORDERS])
def test_nothing_is_widened_where_nothing_can_be_flushed(order: str | None) -> None:
    """Except for the budget, a reported figure."""
    a, b = nvfp4(4, (5, 6, 96), "wide")
    strict = bounds(a, b, out_dtype=torch.float32, order=order)
    flushed = bounds(a, b, out_dtype=torch.float32, order=Summation(order, flushes=True))
    large = strict.lower.abs().minimum(strict.upper.abs()) > 1
    for part in ("lower", "upper", "exact", "tier"):
        assert torch.equal(getattr(flushed, part)[large], getattr(strict, part)[large])
    assert large.any()


def test_a_truncating_unit_has_no_bound_for_very_long_sums() -> None:
    codes = torch.zeros(1, 1 << 23, dtype=torch.uint8)
    a = Quantized(codes, torch.ones(1), None, find_recipe("fp8-current-e4m3"), (1, 1 << 23))
    with pytest.raises(ValueError, match="decoded first, have a bound for K up to 4194304, not 8388608"):
        bounds(a, a, out_dtype=torch.float32, order=Summation(truncates=True))


@pytest.mark.parametrize(
    ("order", "truncates", "message"),
    [
        ("split-0", False, "the order of a sum is 'sequential', 'blocks', 'tree', 'split-<n>[-tree]', "),
        ("split-0", False, "'split-at-<k>[-<k>…]…', or None for any order; not 'split-0'"),
        ("split-0-aligned-13-32", False, "not 'split-0-aligned-13-32'"),
        ("split-2-out", False, "not 'split-2-out'"),
        ("split-2-aligned-13-32-out-tree", False, "not 'split-2-aligned-13-32-out-tree'"),
        ("aligned-13-32-out", False, "not 'aligned-13-32-out'"),
        ("split-at-aligned-13-32", False, "not 'split-at-aligned-13-32'"),
        ("split-at-64-32", False, "starts slices at columns 64, 32, which do not ascend"),
        ("split-2-aligned-13-32-100", False, "promotes sums of 100 columns, no multiple of 32"),
        ("decoded-aligned-13-32-64", False, "not 'decoded-aligned-13-32-64'"),
        ("decoded-blocks", False, "not 'decoded-blocks'"),
        ("decoded-aligned-50-32", False, "'decoded-aligned-50-32' is simulated in float64: F + 2 + log2(W + 1) is 58"),
        ("split-n", False, "not 'split-n'"),
        ("aligned-13", False, "not 'aligned-13'"),
        ("aligned-50-32", False, "'aligned-50-32' is simulated in float64: F + 2 + log2(W + 1) is 58, above 53"),
        ("aligned-13-32-100", False, "'aligned-13-32-100' promotes sums of 100 columns, no multiple of 32"),
        ("aligned-13-32", True, "'aligned-13-32' defines the truncation of the accumulator; "
         "declare the order or truncation, not both"),
    ],
)  # fmt: skip
def test_orders_that_there_are_not(order: str, truncates: bool, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Summation(order, truncates=truncates)
