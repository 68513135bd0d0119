"""FP8 with scales of blocks: the chain of fused multiply-adds against fractions, and what certifies its fast steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowgauge.reference.gemm.fast import promoted_sum as fast
from narrowgauge.reference.gemm.fast.promoted_sum import fast_promoted_sum, scales_fold
from narrowgauge.reference.gemm.gemm import gemm
from narrowgauge.reference.gemm.promotion import BlockScaledOperands, promoted_sum
from narrowgauge.reference.gemm.split_k import SplitK
from narrowgauge.reference.numbers import exact
from narrowgauge.reference.numbers.exact import addcmul_rounds_once, fma
from narrowgauge.reference.scalar import rounding
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from tests.golden import bits
from tests.reference import narrow
from tests.reference.narrow import BLOCK_PAIRS, pair


def chain(a: Quantized, b: Quantized, i: int, j: int) -> float:
    """y = fma(fl(P·s_a), s_b, y) over blocks of 128 in fractions; infinite once something overflows."""
    left, right = narrow.elements(a)[i], narrow.elements(b)[j]
    s_a, s_b = narrow.factors(a)[i], narrow.factors(b)[j]
    y = 0.0
    for start in range(0, len(left), 128):
        block = slice(start, start + 128)
        exact = sum(Fraction(p) for p in (left[block] * right[block]).tolist())
        partial = rounding.nearest(exact, "float32")
        scaled = rounding.nearest(Fraction(partial) * Fraction(s_a[start]), "float32")
        y = rounding.nearest(Fraction(scaled) * Fraction(s_b[start]) + Fraction(y), "float32")
    return y


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["one", "pow2", "near", "wide", "small"])
@pytest.mark.parametrize("names", BLOCK_PAIRS, ids="-".join)
def test_blocks_are_promoted_by_a_fused_multiply_add(names: tuple[str, str], kind: str) -> None:
    for seed, (k, family) in enumerate([(1, "any"), (128, "data"), (300, "any"), (640, "data")]):
        a, b = pair(names, seed, (3, 130 if "128x128" in names[1] else 3, k), kind, family)
        y = gemm(a, b, out_dtype=torch.float32)
        for i, j in itertools.product(range(3), {0, 1, b.shape[0] - 1}):
            assert y[i, j].item() == chain(a, b, i, j)


@pytest.mark.parametrize(
    ("exponents", "folds"),
    [((-66, -65), True), ((-66, -66), False), ((-126, 0), True), ((0, -126), True), ((51, 51), True), ((52, 51), False),
     ((-140, 10), False), ((102, -126), True), ((103, -126), False)],
)  # fmt: skip
def test_scales_are_folded_into_operands_if_exact(exponents: tuple[int, int], folds: bool) -> None:
    """Up to the last exponent: the smallest numbers and the largest sum of a block, of E4M3."""
    codes = np.full((4, 256), 0x7E, np.uint8)
    codes[1], codes[2] = 0x01, np.arange(256) & 0x7D
    a, b = (
        Quantized(torch.from_numpy(codes), torch.full((4, 2), 2.0**e), None, find_recipe("fp8-block-1x128"), (4, 256))
        for e in exponents
    )
    assert scales_fold(BlockScaledOperands(a, b)) == folds
    y = gemm(a, b, out_dtype=torch.float32)
    for i, j in itertools.product(range(4), repeat=2):
        if y[i, j].isfinite():
            assert y[i, j].item() == chain(a, b, i, j)
    for wrong in (0.0, math.inf, math.nan, 1.5, -1.0):
        b.scales[2, 1] = wrong
        assert not scales_fold(BlockScaledOperands(a, b))


def test_fma_rounds_once_at_ties_and_below_the_normal_numbers() -> None:
    rng = np.random.default_rng(4)
    odd = 2 * rng.integers(0, 2**23, 400) + 1
    x = [*(1 + odd * 2.0**-24).tolist(), *rng.standard_normal(400).tolist(), *([2.0**-100, 2.0**-120] * 100)]
    y = rng.choice([1.0, 1 + 2.0**-12, 2.0**-48, 3.0 * 2.0**-30, 1.5], len(x))
    z = rng.choice([0.0, 1.0, -1.0, 2.0**-24, 2.0**-149, -(2.0**-140), 2.0**30, 1 + 2.0**-23], len(x))
    x32, y32, z32 = (np.asarray(v, np.float32) for v in (x, y, z))
    found = fma(*(torch.from_numpy(v) for v in (x32, y32, z32))).tolist()
    for p, q, r, got in zip(x32.tolist(), y32.tolist(), z32.tolist(), found, strict=True):
        assert got == rounding.nearest(Fraction(p) * Fraction(q) + Fraction(r), "float32")


def test_fma_breaks_a_tie_by_what_float64_cannot_hold() -> None:
    """1 + (2^-24 ± 2^-70) is no tie of float32, but in float64 it rounds to one."""
    for sign, expected in ((1, 1 + 2.0**-23), (-1, 1.0)):
        odd = 1 + sign * 2.0**-23
        x, y = torch.tensor([odd * 2.0**-12]), torch.tensor([odd * 2.0**-12])
        product = Fraction(x.item()) * Fraction(y.item())
        assert product - Fraction(1, 2**24) == sign * Fraction(1, 2**46) + Fraction(1, 2**70)
        z = torch.tensor([1.0])
        assert fma(x, y, z) == expected
    x, y = torch.tensor([(2.0**23 - 1) * 2.0**-47]), torch.tensor([(2.0**23 + 1) * 2.0**-23])
    assert Fraction(x.item()) * Fraction(y.item()) == Fraction(1, 2**24) - Fraction(1, 2**70)
    assert 1 + x.double() * y.double() == 1 + 2.0**-24
    assert fma(x, y, torch.tensor([1.0])) == 1


# Whether addcmul is a fused multiply-add: asked of the device.


def _separate(y: torch.Tensor, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return x * factor + y


def _by_float64(y: torch.Tensor, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (x.double() * factor.double() + y.double()).float()


def _flushed(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x.abs() < 2.0**-126, 0.0)


def _fused(y: torch.Tensor, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return fma(x, factor.expand_as(x), y)


OTHERWISE: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "rounded twice": _separate,
    "through float64": _by_float64,
    "outputs flushed": lambda y, x, factor: _flushed(_fused(y, x, factor)),
    "factors flushed": lambda y, x, factor: _fused(y, _flushed(x), factor),
    "addends flushed": lambda y, x, factor: _fused(_flushed(y), x, factor),
}


def _answer(monkeypatch: pytest.MonkeyPatch, compute: Callable[..., torch.Tensor]) -> bool:
    """Device model that computes the same."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "addcmul_", lambda y, x, factor: y.copy_(compute(y, x, factor)))
        return addcmul_rounds_once.__wrapped__("cpu")


@pytest.mark.parametrize("how", OTHERWISE)
def test_an_addcmul_that_rounds_otherwise_is_not_trusted(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _answer(monkeypatch, _fused)
    assert not _answer(monkeypatch, OTHERWISE[how])


def test_the_chain_is_right_at_ties_and_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """For two blocks with a single 1: y = fl(s_a·s_b), then fma(s_a, s_b, y).

    x·factor is half an ulp of y, or slightly more or less; float64 rounds some of these numbers to a tie.
    """
    up, down = 1 + 2.0**-23, 1 - 2.0**-24
    y = [1.0, up, -1.0, -up, 2.0**-125, 2.0**-140]
    x = [2.0**-12, up * 2.0**-12, down * 2.0**-12, -(2.0**-12), (2.0**23 - 1) * 2.0**-47, 2.0**-137, 2.0**-140]
    factor = [2.0**-12, up * 2.0**-12, down * 2.0**-12, up, 1.5 * 2.0**-12, 2.0**-13]
    codes = torch.zeros(len(y) * len(x), 256, dtype=torch.uint8)
    codes[:, ::128] = 0x38  # 1
    left = torch.tensor(list(itertools.product(y, x)))
    right = torch.tensor([(1.0, one) for one in factor])
    a, b = (
        Quantized(codes[: len(scales)], scales, None, find_recipe("fp8-block-1x128-e4m3-fp32"), (len(scales), 256))
        for scales in (left, right)
    )
    expected = torch.tensor([[chain(a, b, i, j) for j in range(len(factor))] for i in range(len(left))])

    # Numbers near a tie that float64 rounds to a tie, and ties that float64 loses.
    s = (left[:, 1:].double() * right[:, 1].double() + left[:, :1].double()).numpy()
    tie = (s.view(np.int64) & ((1 << 29) - 1)) == 1 << 28
    kinds = set()
    for i, j in np.ndindex(*s.shape):
        true = Fraction(left[i, 1].item()) * Fraction(right[j, 1].item()) + Fraction(left[i, 0].item())
        kinds.add((bool(tie[i, j]), Fraction(s[i, j]) == true, bool(abs(s[i, j]) < 2.0**-126)))
    assert kinds >= {(True, True, False), (True, False, False), (False, True, False), (False, True, True)}
    assert (torch.from_numpy(s).float() != expected).any()

    assert torch.equal(gemm(a, b, out_dtype=torch.float32), expected)
    for once in (True, False):
        if once and not addcmul_rounds_once("cpu"):
            monkeypatch.setattr(torch.Tensor, "addcmul_", lambda y, x, factor: y.copy_(_fused(y, x, factor)))
        monkeypatch.setattr(exact, "addcmul_rounds_once", lambda device, once=once: once)
        assert torch.equal(gemm(a, b, out_dtype=torch.float32), expected)


# Whether a float64 matmul of a block is exact.

LARGEST, ONE, LEAST = 0x7B, 0x3C, 0x01  # of E5M2: 57344, 1, 2^-16
E4M3_LEAST, EIGHT, E4M3_16, E4M3_256, E4M3_LARGEST = 0x01, 0x50, 0x58, 0x78, 0x7E  # 2^-9, 8, 16, 256, 448


def block_operands(left: np.ndarray, right: np.ndarray) -> tuple[Quantized, Quantized]:
    """Codes of E5M2 and of E4M3 under scales of 1 and of 1.5."""
    kinds = ("fp8-block-1x128-e5m2-fp32", 1.0), ("fp8-block-1x128-e4m3-fp32", 1.5)
    a, b = (
        Quantized(
            torch.from_numpy(codes), torch.full((codes.shape[0], -(-codes.shape[1] // 128)), scale), None,
            find_recipe(kind), (codes.shape[0], codes.shape[1]),
        )
        for codes, (kind, scale) in zip((left, right), kinds, strict=True)
    )  # fmt: skip
    return a, b


@pytest.mark.parametrize("columns", [256, 250])
@pytest.mark.parametrize("block", [0, 1])
def test_a_block_is_certified_by_its_own_codes(block: int, columns: int) -> None:
    """128·(2^15 / 2^-13)·(2^8 / 2^-9) is 2^52, and exact; with 2^-14 instead of 2^-13 it is 2^53, too large."""
    left, right = np.full((3, columns), 0x78, np.uint8), np.full((2, columns), E4M3_256, np.uint8)
    at = 128 * block + 7
    right[1, [8, 136]] = E4M3_LEAST
    left[2, at] = 0x10  # 2^-11, a multiple of 2^-13 as all of its exponent are
    a, b = block_operands(left, right)
    assert BlockScaledOperands(a, b).float64_exact == [True, True]
    left[2, at] = 0x0C  # 2^-12, of 2^-14
    a, b = block_operands(left, right)
    assert BlockScaledOperands(a, b).float64_exact == [block != 0, block != 1]
    y = gemm(a, b, out_dtype=torch.float32)
    assert all(y[i, j].item() == chain(a, b, i, j) for i, j in np.ndindex(3, 2))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_block_that_is_not_certified_is_summed_all_the_same(sign: int) -> None:
    """126·57344·448 + 16·8 is a tie of float32, which 2^-25 breaks; float64 loses 2^-25."""
    left, right = np.zeros((2, 256), np.uint8), np.zeros((1, 256), np.uint8)
    left[:, :126], right[:, :126] = LARGEST, E4M3_LARGEST
    left[:, 126], right[:, 126] = 0x4C, EIGHT  # 16
    left[0, 127], right[0, 127] = LEAST, E4M3_LEAST | (0x80 if sign < 0 else 0)
    left[:, 128:], right[:, 128:] = ONE, EIGHT
    a, b = block_operands(left, right)
    blocks = BlockScaledOperands(a, b)
    assert blocks.float64_exact == [False, True]
    total = 126 * 57344 * 448 + 128
    assert total % 512 == 128
    exact_sum = Fraction(total) + sign * Fraction(1, 2**25)
    assert sum(Fraction(p) for p in (narrow.elements(a)[0] * narrow.elements(b)[0])[:128]) == exact_sum
    plain = (blocks.left[:, :128] @ blocks.right[:, :128].T).float()
    assert (plain[0].item() != rounding.nearest(exact_sum, "float32")) == (sign > 0)
    y = gemm(a, b, out_dtype=torch.float32)
    assert [y[i, 0].item() for i in range(2)] == [chain(a, b, i, 0) for i in range(2)]


# Tiles.


@pytest.mark.sampled(5)
@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("names", BLOCK_PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", ["pow2", "near"])
def test_outputs_are_the_same_in_tiles_of_any_size(
    names: tuple[str, str], kind: str, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair(names, 7, (133, 140, 520), kind, "data")
    whole = fast_promoted_sum(a, b, slices=slices)
    for i, j in itertools.product((0, 132), (0, 139)):
        if slices == 1:
            assert whole[i, j].item() == chain(a, b, i, j)
    for tile in ((1, 140), (133, 1), (50, 64), (132, 139)):
        monkeypatch.setattr(fast, "_TILE", {"cpu": tile})
        assert torch.equal(bits(fast_promoted_sum(a, b, slices=slices)), bits(whole))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("slices", [1, 2, 5])
@pytest.mark.parametrize("names", BLOCK_PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", ["one", "pow2", "near", "wide", "small", "large", "wild"])
def test_the_fast_promoted_sum_equals_the_plain_one(names: tuple[str, str], kind: str, slices: int) -> None:
    for seed, (shape, family) in enumerate(
        [
            ((5, 7, 31), "any"),
            ((30, 20, 520), "data"),
            ((9, 300, 256), "sparse"),
            ((0, 3, 128), "any"),
            ((3, 4, 0), "any"),
        ]
    ):
        a, b = pair(names, seed, shape, kind, family)
        fast_bits = bits(fast_promoted_sum(a, b, slices=slices))
        assert torch.equal(fast_bits, bits(promoted_sum(a, b, split=SplitK(slices))))
