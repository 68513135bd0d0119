"""The fast running error bounds equal the plain bounds bit for bit, and their certificates hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from narrowgauge.reference.bounds import summation_orders
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.bounds.decoded_operands import DecodedOperands
from narrowgauge.reference.bounds.fast import certified_sum as certified
from narrowgauge.reference.bounds.fast.block_order import exact_blocks_error, power_of_two_block_sums
from narrowgauge.reference.bounds.fast.certified_sum import certified_sum
from narrowgauge.reference.bounds.fast.exactness_certificate import exactness_certificate, magnitude_in_quanta
from narrowgauge.reference.bounds.running_error import CHUNK, PartialSums, empty_sums, sequential_sum
from narrowgauge.reference.bounds.summation_orders import block_sums, float64_exact
from narrowgauge.reference.gemm.operands import element_values, format_span, operand, scale_values
from narrowgauge.reference.numbers.exact import lowest_bit
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import UNIT, Summation
from tests.reference.gemm.test_gemm_formats import pair
from tests.reference.narrow import codes

FAMILIES = ("any", "data", "positive", "sparse", "lattice")
PAIRS = [
    ("fp8-current-e4m3", "fp8-current-e4m3"),
    ("fp8-current-e5m2", "fp8-current-e4m3"),
    ("mxfp6-e2m3", "fp8-current-e4m3"),
]
SHAPES = [(1, 1, 1), (5, 7, 31), (40, 33, 75), (64, 50, 320)]


def numbers(name: str, seed: int, rows: int, columns: int, family: str = "data") -> torch.Tensor:
    """Elements of a recipe, float64 (rows, columns)."""
    chosen = codes(name, np.random.default_rng(seed), rows, columns, family)
    return torch.from_numpy(np.array(find_recipe(name).element.values)[chosen])


def operands(
    names: tuple[str, str], seed: int, shape: tuple[int, int, int], family: str = "data"
) -> tuple[torch.Tensor, torch.Tensor]:
    m, n, k = shape
    return numbers(names[0], seed, m, k, family), numbers(names[1], seed + 50, n, k, family)


def partial_sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The partial sums of all products in order of K, (M, N, K)."""
    return (x.unsqueeze(1) * y).cumsum(2)


def same(first: PartialSums, second: PartialSums) -> bool:
    fields = ("total", "magnitude", "quantum", "error")
    return all(torch.equal(getattr(first, field), getattr(second, field)) for field in fields)


# The certificate.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_certified_partial_sums_do_not_round_and_keep_their_sign(names: tuple[str, str], family: str) -> None:
    """Up to 64 columns behind earlier columns."""
    x, y = operands(names, 3, (24, 30, 96), family)
    certificate = exactness_certificate(x, y, exact=True)
    assert certificate is not None
    for first, last in ((0, 1), (0, 32), (32, 64), (32, 96)):
        power_sums = certificate.columns(slice(0, min(last, 64))).power_sums()
        if last > 64:
            power_sums = torch.maximum(power_sums, certificate.columns(slice(64, last)).power_sums())
        sums = partial_sums(x, y)
        before = sums[:, :, first - 1] if first else torch.zeros_like(power_sums)
        middle = (before + sums[:, :, last - 1]).abs()
        size = x[:, first:last].abs() @ y[:, first:last].abs().T
        chunk = sums[:, :, first:last]
        fits = (chunk.float() == chunk).all(2)
        certain = magnitude_in_quanta(power_sums, middle + size) <= certificate.exact_limit
        assert fits[certain].all()
        assert certain.any() or family in ("any", "positive")  # whose sums are large compared with their lowest bits
        same_sign = (chunk >= 0).all(2) | (chunk <= 0).all(2)
        assert same_sign[middle >= size].all()


def test_the_certificate_holds_up_to_2_to_the_25_quanta() -> None:
    x, y = operands(("fp8-current-e5m2", "fp8-current-e4m3"), 5, (30, 30, 32))
    x[3], y[4, 7:] = 0, 0
    certificate = exactness_certificate(x, y, exact=True)
    assert certificate is not None
    sums = partial_sums(x, y)[:, :, -1].abs() + x.abs() @ y.abs().T
    scale = 2.0 ** torch.arange(-12, 12, dtype=torch.float64).view(-1, 1, 1)
    for magnitude in sums * scale:
        products = (x.unsqueeze(1) * y).abs()
        indivisible = torch.stack([products / 2.0**e % 1 != 0 for e in range(-40, 40)])
        lowest = torch.where(products.any(2), 2.0 ** (indivisible.any(3).double().argmax(0) - 41.0), torch.inf)
        certain = magnitude_in_quanta(certificate.power_sums(), magnitude) <= certificate.exact_limit
        assert torch.equal(certain, magnitude <= 2.0**25 * lowest)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([[0.0, 0.0]], [[1.0, 2.0]]),  # no nonzero product
        ([[2.0**-60, 1.0]], [[2.0**-60, 1.0]]),  # products below the range of float32
        ([[2.0**70, 1.0]], [[2.0**70, 1.0]]),  # products above the range of float32
        ([[2.0**30, 1.0]], [[2.0**30, 1.0]]),  # a sum with more bits than float64
    ],
)
def test_operands_without_a_certificate(left: list[list[float]], right: list[list[float]]) -> None:
    sides = (torch.tensor(side, dtype=torch.float64) for side in (left, right))
    assert exactness_certificate(*sides, exact=False) is None


# certified_sum equals sequential_sum.


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("names", "family"), list(product(PAIRS, FAMILIES)))
def test_certified_sum_equals_sequential_sum(names: tuple[str, str], family: str) -> None:
    """Also with zeros at the start and in between, and with earlier errors."""
    for seed, (m, n, k) in enumerate(SHAPES):
        x, y = operands(names, seed, (m, n, k), family)
        x[: m // 3, : k // 2], y[n // 2 :, ::5] = 0, 0
        certificate = exactness_certificate(x, y, exact=False)
        empty = empty_sums(m, n, x.device)
        error = torch.where(torch.arange(n) % 2 == 0, 2.0**-9, 0.0).double().expand(m, n).clone()
        for before in (empty, replace(empty, error=error)):
            for roundoff in (UNIT, 2 * UNIT):
                plain = sequential_sum(x, y, roundoff, before)
                assert same(certified_sum(x, y, roundoff, before, certificate), plain)
        assert not empty.error.any()


def test_few_doubtful_outputs_are_followed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to settle doubtful outputs run, and `follow_additions` never does."""
    calls: dict[str, int] = {}
    for name in ("same_sign_errors", "follow_doubtful"):
        method = getattr(certified._Chunk, name)

        def counted(self: object, *given: torch.Tensor, name: str = name, method: object = method) -> object:
            calls[name] = calls.get(name, 0) + 1
            return method(self, *given)  # type: ignore[operator]

        monkeypatch.setattr(certified._Chunk, name, counted)
    x, y = operands(("fp8-current-e4m3", "fp8-current-e4m3"), 11, (96, 80, 768))
    x *= 2.0 ** torch.randint(-2, 3, x.shape, generator=torch.Generator().manual_seed(0))
    empty = empty_sums(96, 80, x.device)
    plain = sequential_sum(x, y, UNIT, empty)

    def refused(*_: object) -> None:
        raise AssertionError("all outputs were followed")

    monkeypatch.setattr(certified, "follow_additions", refused)
    fast = certified_sum(x, y, UNIT, empty, exactness_certificate(x, y, exact=False))
    assert same(fast, plain)
    assert 0 < int((fast.error != 0).sum()) < fast.error.numel()
    assert min(calls["same_sign_errors"], calls["follow_doubtful"]) > 5, calls


def test_if_most_outputs_are_doubtful_all_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms 2^24 and 3 alternate."""
    x = torch.tensor([2.0**24, 3.0] * CHUNK, dtype=torch.float64).expand(8, -1).contiguous()
    y = torch.where(torch.arange(2 * CHUNK) % 4 < 2, 1.0, -1.0).double().expand(8, -1).contiguous()
    empty = empty_sums(8, 8, x.device)
    calls = []
    follow = certified.follow_additions
    monkeypatch.setattr(certified, "follow_additions", lambda *given: calls.append(follow(*given)))
    fast = certified_sum(x, y, UNIT, empty, exactness_certificate(x, y, exact=False))
    assert same(fast, sequential_sum(x, y, UNIT, empty))
    assert calls
    assert fast.error.all()


# The order "blocks".


def decoded(a: Quantized, b: Quantized) -> DecodedOperands:
    left, right = operand(a), operand(b)
    return DecodedOperands(
        left, right,
        elements=(element_values(a), element_values(b)),
        scales=(scale_values(a), scale_values(b)),
        block_width=a.recipe.block[1], slice_step=a.recipe.block[1],
        element_span=format_span(a.recipe.element) * format_span(b.recipe.element),
        magnitude=left.abs() @ right.abs().T,
        quantum=torch.outer(lowest_bit(left), lowest_bit(right)),
    )  # fmt: skip


def plain_block_sums(given: DecodedOperands) -> PartialSums:
    empty = empty_sums(len(given.left), len(given.right), given.left.device)
    return block_sums(given, Summation("blocks"), slice(0, given.columns), empty, None)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["equal", "near"])
def test_power_of_two_block_sums_equal_block_sums(kind: str, family: str) -> None:
    """Errors and totals bit for bit; the fast version takes magnitude and quantum from the operands."""
    for names in (("mxfp8-e4m3", "mxfp8-e4m3"), ("mxfp6-e3m2", "mxfp8-e4m3")):
        for seed, shape in enumerate([(5, 7, 31), (40, 33, 150), (64, 70, 320)]):
            given = decoded(*pair(names, seed, shape, kind, family))
            assert float64_exact(given, Summation("blocks"))
            certificate = exactness_certificate(given.left, given.right, exact=True)
            assert certificate is not None
            fast, plain = power_of_two_block_sums(given, certificate, UNIT), plain_block_sums(given)
            assert torch.equal(fast.total, plain.total)
            assert torch.equal(fast.error, plain.error)


@pytest.mark.parametrize("family", ["any", "positive", "sparse", "lattice"])
def test_the_error_of_exact_blocks_starts_at_the_first_rounding(family: str) -> None:
    """Against a loop over outputs, and as an upper bound of the recurrence of `block_sums`."""
    rounded = 0
    for seed, shape in enumerate([(3, 4, 96), (4, 5, 700)]):
        given = decoded(*pair(("mxfp4", "mxfp4"), seed, shape, "near", family))
        exponents = torch.randint(0, 24, (1, shape[2] // 32 + 1), generator=torch.Generator().manual_seed(seed))
        given.left *= 2.0 ** exponents.repeat_interleave(32, 1)[:, : shape[2]]
        given.scales[0].mul_(2.0 ** exponents[:, : given.scales[0].shape[1]])
        given.quantum *= 2.0 ** int(exponents.amin())
        fast, plain = exact_blocks_error(given, UNIT), plain_block_sums(given).error
        assert ((plain <= fast) & (fast <= plain * (1 + 2.0**-18))).all()
        for i, j in np.ndindex(*shape[:2]):
            total, error, rounds = 0.0, 0.0, False
            for start in range(0, shape[2], 32):
                products = given.left[i, start : start + 32] * given.right[j, start : start + 32]
                total += float(products.sum())
                rounds = rounds or float(np.float32(total)) != total
                error += UNIT * abs(total) * (rounds and bool(products.any()))
            assert error <= fast[i, j] <= error * (1 + 2.0**-18)
            rounded += rounds
    assert rounded


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("kind", "family"), list(product(("equal", "near", "wide"), FAMILIES)))
def test_bounds_of_mx_are_the_same_without_the_fast_paths(
    kind: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for names in (("mxfp8-e4m3", "mxfp8-e4m3"), ("mxfp8-e5m2", "mxfp8-e4m3")):
        for seed, shape in enumerate([(5, 7, 31), (40, 33, 150), (64, 70, 320)]):
            a, b = pair(names, seed, shape, kind, family)
            fast = fields_of_bounds(a, b)
            with monkeypatch.context() as patched:
                patched.setattr(summation_orders, "has_powers", lambda _: False)
                without_blocks = fields_of_bounds(a, b)
                patched.setattr(summation_orders, "exactness_certificate", lambda *_, **__: None)
                plain = fields_of_bounds(a, b)
            assert all(map(torch.equal, fast, without_blocks))
            assert all(map(torch.equal, fast, plain))


def fields_of_bounds(a: Quantized, b: Quantized) -> list[torch.Tensor]:
    return list(vars(bounds(a, b, out_dtype=torch.float32, order="blocks")).values())
