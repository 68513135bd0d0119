"""Sums of products of known numbers: no kernel's sum leaves the bounds, and exact sums are those of every kernel."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

import narrowgauge
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.bounds.factor_sums import factor_bounds
from narrowgauge.reference.contracts.products import NARROW, WIDE
from narrowgauge.reference.gemm.tensor_core import Factors, power_of_two

M, N, K = 6, 5, 96


def factors(x: torch.Tensor, least: float) -> Factors:
    return Factors(x, power_of_two(x).clamp_(min=least).mul_(x != 0))


def matrices(kind: str, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices (M, K) and (N, K) of numbers with few bits."""
    x, w = (torch.randn(rows, K, generator=draw, dtype=torch.float64) for rows in (M, N))
    if kind == "integers":
        return x.mul(2).round(), w.mul(2).round()
    if kind == "sparse":
        x *= torch.rand(M, K, generator=draw) < 0.05
    if kind == "wide":
        x *= torch.exp2(torch.randint(-12, 13, (M, K), generator=draw).double())
    if kind == "cancelling":
        x[:, K // 2 :] = -x[:, : K // 2] * (1 + 2.0**-6)
        w[:, K // 2 :] = w[:, : K // 2]
    return x, w


def in_steps(products: list[Fraction], powers: list[Fraction], fraction: int, width: int) -> Fraction:
    """The sum of a tensor core in exact arithmetic: terms and results are truncated toward zero."""

    def truncated(x: Fraction, last: Fraction) -> Fraction:
        return (abs(x) // last) * last * (1 if x > 0 else -1)

    def exponent(x: Fraction) -> Fraction:
        power = Fraction(1)
        while power > x:
            power /= 2
        while power * 2 <= x:
            power *= 2
        return power

    total = Fraction(0)
    for start in range(0, len(products), width):
        some = [p for p in products[start : start + width] if p] + [total] * (total != 0)
        if not some:
            continue
        tops = [power for p, power in zip(products[start : start + width], powers[start : start + width]) if p]  # noqa: B905
        largest = max([*tops, *([exponent(abs(total))] if total else [])])
        total = sum((truncated(x, largest / 2**fraction) for x in some), Fraction(0))
        if total:
            total = truncated(total, exponent(abs(total)) / 2 ** min(fraction, 23))
    return total


def in_a_tree(products: np.ndarray, draw: np.random.Generator) -> float:
    """The float32 sum in a random tree."""
    nodes = list(products.astype(np.float32))
    while len(nodes) > 1:
        i, j = sorted(draw.choice(len(nodes), 2, replace=False))
        nodes[i] = np.float32(nodes[i] + nodes.pop(j))
    return float(nodes[0])


@pytest.mark.parametrize("kind", ["normal", "integers", "sparse", "wide", "cancelling"])
@pytest.mark.parametrize("narrow", [False, True])
def test_sums_of_kernels_lie_inside(kind: str, narrow: bool) -> None:
    draw = torch.Generator().manual_seed(len(kind))
    dtype, least = (torch.float8_e4m3fn, 2.0**-6) if narrow else (torch.bfloat16, 2.0**-126)
    largest = torch.finfo(dtype).max  # torch 2.11 converts larger numbers to NaN
    x, w = (matrix.clamp(-largest, largest).to(dtype).double() for matrix in matrices(kind, draw))
    left, right = factors(x, least), factors(w, least)
    total = x @ w.T
    error, exact, overflow = factor_bounds(left, right, total, *(NARROW if narrow else WIDE))
    assert not overflow.any()
    if kind == "integers":
        assert exact.all() or narrow
    models = ((13, 32), (25, 32)) if narrow else ((24, 8), (25, 16), (25, 32))
    random = np.random.default_rng(len(kind))
    for row in range(M):
        for column in range(N):
            sum_, distance = float(total[row, column]), float(error[row, column])
            products = (x[row] * w[column]).numpy()
            powers = (left.powers[row] * right.powers[column]).numpy()
            order = random.permutation(K)
            fractions, tops = ([Fraction(float(v)) for v in values[order]] for values in (products, powers))
            found = [float(np.float32(float(in_steps(fractions, tops, *model)))) for model in models]
            found += [in_a_tree(products[order], random) for _ in range(2)]
            assert all(abs(value - sum_) <= distance + np.spacing(np.float32(abs(sum_))) / 2 for value in found)
            if exact[row, column]:
                assert {*found} == {sum_}


def test_a_wrong_sum_lies_outside() -> None:
    """The bound is less than an ulp of bfloat16 for sums of 96 products of one sign."""
    x, w = (matrix.bfloat16().double().abs() for matrix in matrices("normal", torch.Generator().manual_seed(1)))
    error, *_ = factor_bounds(factors(x, 2.0**-126), factors(w, 2.0**-126), x @ w.T, *WIDE)
    assert bool((2 * error < (x @ w.T) * 2.0**-9).all())


@pytest.mark.parametrize("recipe", ["fp8-row-e4m3", "mxfp8-e4m3", "nvfp4", "fp8-block-1x128-e4m3-fp32"])
def test_a_simulated_order_lies_inside_its_fraction(recipe: str) -> None:
    """The bounds of `gemm` with "fraction-13-32" hold "aligned-13-32", and sums with more bits."""
    x, w = (narrowgauge.inputs(recipe, (24, 512), "normal", seed) for seed in (0, 1))
    other = "fp8-block-128x128-e4m3-fp32" if "block" in recipe else recipe
    a, b = narrowgauge.quantize(x, recipe), narrowgauge.quantize(w, other)
    limits = bounds(a, b, out_dtype=torch.float32, order="fraction-13-32")
    rounded = 0
    for order in ("aligned-13-32", "aligned-20-16"):
        found = bounds(a, b, out_dtype=torch.float32, order=order).expected
        assert bool(((found >= limits.lower) & (found <= limits.upper)).all())
        rounded += int((found != limits.expected).sum())
    assert rounded > 500
    assert not bool(limits.undetermined.any())


def lost(x: torch.Tensor, w: torch.Tensor, least: float, model: tuple[int, int]) -> tuple[float, float]:
    """The loss of a tensor core in a sum, and the bound."""
    left, right = factors(x.view(1, -1), least), factors(w.view(1, -1), least)
    total = left.values @ right.values.T
    powers = [Fraction(float(p)) for p in (left.powers * right.powers)[0]]
    found = in_steps([Fraction(float(p)) for p in x * w], powers, *model)
    return abs(float(found) - float(total)), float(factor_bounds(left, right, total, *model)[0])


def test_every_step_may_lose_bits() -> None:
    """A small product per step: the accumulator loses all of them."""
    x = torch.zeros(256, dtype=torch.float64)
    x[::8] = 1.875 * 2.0**-24
    x[0] = 1
    distance, bound = lost(x, torch.ones_like(x), 2.0**-126, WIDE)
    assert 31 * 2.0**-24 < distance <= bound


def test_a_subnormal_element_shifts_the_others_out() -> None:
    """2^-9·448 is aligned as 2^-6·2^8, and the other products of the step lie below the last bit."""
    x, w = torch.full((32,), 1.75 * 2.0**-6, dtype=torch.float64), torch.full((32,), 2.0**-6, dtype=torch.float64)
    x[0], w[0] = 2.0**-9, 448
    distance, bound = lost(x, w, 2.0**-6, NARROW)
    assert 33 * 2.0**-13 < distance <= bound
