"""Sums that are known not to round: what is known of them is so, and what becomes of the others is as if none were."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from narrowgauge.reference.bounds import marked, schedules
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.bounds.certificate import marks, reach
from narrowgauge.reference.bounds.marked import marked_sum
from narrowgauge.reference.bounds.running import CHUNK, Running, empty, running_sum
from narrowgauge.reference.numbers.blocks import tiles
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import UNIT
from tests.reference.gemm.test_gemm_formats import BLOCK_PAIRS, pair
from tests.reference.narrow import codes

FAMILIES = ("any", "data", "positive", "sparse", "lattice")
PAIRS = [
    ("fp8-current-e4m3", "fp8-current-e4m3"),
    ("fp8-current-e5m2", "fp8-current-e4m3"),
    ("mxfp6-e2m3", "fp8-current-e4m3"),
]
SHAPES = [(1, 1, 1), (5, 7, 31), (40, 33, 75), (64, 50, 320)]


def numbers(name: str, seed: int, rows: int, columns: int, family: str = "data") -> torch.Tensor:
    """float64 (rows, columns) of a recipe's elements."""
    chosen = codes(name, np.random.default_rng(seed), rows, columns, family)
    return torch.from_numpy(np.array(find_recipe(name).element.values)[chosen])


def operands(
    names: tuple[str, str], seed: int, shape: tuple[int, int, int], family: str = "data"
) -> tuple[torch.Tensor, torch.Tensor]:
    m, n, k = shape
    return numbers(names[0], seed, m, k, family), numbers(names[1], seed + 50, n, k, family)


def partial_sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Every sum of the first products, (M, N, K)."""
    return (x.unsqueeze(1) * y).cumsum(2)


def same(one: Running, other: Running) -> bool:
    return all(
        torch.equal(getattr(one, part), getattr(other, part)) for part in ("total", "magnitude", "unit", "error")
    )


# What is known is so.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_what_is_certified_does_not_round_and_keeps_its_sign(names: tuple[str, str], family: str) -> None:
    """Of the products of up to 64 columns behind others."""
    x, y = operands(names, 3, (24, 30, 96), family)
    shown = marks(x, y, exact=True)
    assert shown is not None
    for first, last in ((0, 1), (0, 32), (32, 64), (32, 96)):
        low = shown.columns(slice(0, last)).sum() if last <= 64 else None
        if low is None:
            low = torch.maximum(*(shown.columns(slice(*ends)).sum() for ends in ((0, 64), (64, 96))))
        sums = partial_sums(x, y)
        before = sums[:, :, first - 1] if first else torch.zeros_like(low)
        middle = (before + sums[:, :, last - 1]).abs()
        size = x[:, first:last].abs() @ y[:, first:last].abs().T
        here = sums[:, :, first:last]
        fits = (here.float() == here).all(2)
        certain = reach(low, middle + size) <= shown.limit
        assert fits[certain].all()
        assert certain.any() or family in ("any", "positive")  # whose sums are large beside their lowest bits
        one_sign = (here >= 0).all(2) | (here <= 0).all(2)
        assert one_sign[middle >= size].all()


def test_a_certificate_is_what_it_says() -> None:
    """|s + t| + M up to 2^25 times the lowest bit of the products, which is that of no product by itself."""
    x, y = operands(("fp8-current-e5m2", "fp8-current-e4m3"), 5, (30, 30, 32))
    x[3], y[4, 7:] = 0, 0
    shown = marks(x, y, exact=True)
    assert shown is not None
    sums = partial_sums(x, y)[:, :, -1].abs() + x.abs() @ y.abs().T
    scale = 2.0 ** torch.arange(-12, 12, dtype=torch.float64).view(-1, 1, 1)
    for most in sums * scale:
        odd = (x.unsqueeze(1) * y).abs()
        halved = torch.stack([odd / 2.0**e % 1 != 0 for e in range(-40, 40)])
        lowest = torch.where(odd.any(2), 2.0 ** (halved.any(3).double().argmax(0) - 41.0), torch.inf)
        assert torch.equal(reach(shown.sum(), most) <= shown.limit, most <= 2.0**25 * lowest)


def test_a_mark_of_a_large_number_is_that_of_a_smaller_one() -> None:
    x = torch.tensor([[2.0**-80, 2.0**60], [0.0, 2.0**60]], dtype=torch.float64)
    shown = marks(x, torch.ones(1, 2, dtype=torch.float64), exact=True)
    assert shown is not None
    most = torch.tensor([[2.0**-55], [2.0**7]], dtype=torch.float64)
    assert torch.equal(reach(shown.sum(), most), torch.full_like(most, shown.limit))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([[0.0, 0.0]], [[1.0, 2.0]]),  # nothing to mark
        ([[2.0**-60, 1.0]], [[2.0**-60, 1.0]]),  # terms below what float32 has
        ([[2.0**70, 1.0]], [[2.0**70, 1.0]]),  # above it
        ([[2.0**30, 1.0]], [[2.0**30, 1.0]]),  # a sum of more bits than float64 has
    ],
)
def test_what_has_no_marks(left: list[list[float]], right: list[list[float]]) -> None:
    assert marks(*(torch.tensor(side, dtype=torch.float64) for side in (left, right)), exact=False) is None


# The others are found to the bit.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_the_running_bound_is_the_same_to_the_bit(names: tuple[str, str], family: str) -> None:
    """Of sums that begin with zeros, too, have some in between, and may be off by something before."""
    for seed, (m, n, k) in enumerate(SHAPES):
        x, y = operands(names, seed, (m, n, k), family)
        x[: m // 3, : k // 2], y[n // 2 :, ::5] = 0, 0
        shown = marks(x, y, exact=False)
        none = empty(m, n, x.device)
        off = replace(none, error=torch.where(torch.arange(n) % 2 == 0, 2.0**-9, 0.0).double().expand(m, n).clone())
        for before in (none, off):
            for unit in (UNIT, 2 * UNIT):
                assert same(marked_sum(x, y, unit, before, shown), running_sum(x, y, unit, before))
        assert not none.error.any()


def test_few_sums_are_looked_at_and_they_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to find an error is gone once, where the sums of a block of columns were not looked at one by one."""
    ways: dict[str, int] = {}
    for way in ("same_sign", "look"):
        method = getattr(marked._Columns, way)

        def counted(self: object, *given: torch.Tensor, way: str = way, method: object = method) -> object:
            ways[way] = ways.get(way, 0) + 1
            return method(self, *given)  # type: ignore[operator]

        monkeypatch.setattr(marked._Columns, way, counted)
    x, y = operands(("fp8-current-e4m3", "fp8-current-e4m3"), 11, (96, 80, 768))
    x *= 2.0 ** torch.randint(-2, 3, x.shape, generator=torch.Generator().manual_seed(0))
    none = empty(96, 80, x.device)
    expected = running_sum(x, y, UNIT, none)

    def refused(*_: object) -> None:
        raise AssertionError("all sums were looked at")

    monkeypatch.setattr(marked, "every_partial", refused)
    found = marked_sum(x, y, UNIT, none, marks(x, y, exact=False))
    assert same(found, expected)
    assert 0 < int((found.error != 0).sum()) < found.error.numel()
    assert min(ways["same_sign"], ways["look"]) > 5, ways


def test_where_most_are_in_doubt_all_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms of 2^24 and of 3 by turns."""
    x = torch.tensor([2.0**24, 3.0] * CHUNK, dtype=torch.float64).expand(8, -1).contiguous()
    y = torch.where(torch.arange(2 * CHUNK) % 4 < 2, 1.0, -1.0).double().expand(8, -1).contiguous()
    none = empty(8, 8, x.device)
    seen = []
    every = marked.every_partial
    monkeypatch.setattr(marked, "every_partial", lambda *given: seen.append(every(*given)))
    found = marked_sum(x, y, UNIT, none, marks(x, y, exact=False))
    assert same(found, running_sum(x, y, UNIT, none))
    assert seen
    assert found.error.all()


def test_sizes_that_float64_cannot_add_are_added_in_turn() -> None:
    """2^50 and odd numbers: each sum of them is a float64 number, and no sum of their sizes."""
    x = torch.from_numpy(np.random.default_rng(2).integers(-(2**19), 2**19, (8, 4 * CHUNK)) * 2 + 1).double()
    x[1:] = torch.where(x[1:] < 0, -1.0, 1.0)
    x[0, 0] = 2.0**50
    y = torch.ones(8, 4 * CHUNK, dtype=torch.float64)
    none, shown = empty(8, 8, x.device), marks(x, y, exact=False)
    assert shown is not None
    for columns in (CHUNK, 4 * CHUNK):  # the first time, and again
        here = slice(0, columns)
        found = marked_sum(x[:, here], y[:, here], UNIT, none, shown.columns(here))
        assert same(found, running_sum(x[:, here], y[:, here], UNIT, none))
        assert found.error[0].all()
        assert not found.error[1:].any()


def planes(a: Quantized, b: Quantized, **declared: str) -> list[torch.Tensor]:
    return list(vars(bounds(a, b, out_dtype=torch.float32, **declared)).values())  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["equal", "near", "wide"])
def test_blocks_of_mx_are_the_same_in_one_loop_as_in_turn(
    kind: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of shapes with a tail, and of a tile that is small."""
    for names in (("mxfp8-e4m3", "mxfp8-e4m3"), ("mxfp8-e5m2", "mxfp8-e4m3")):
        for seed, shape in enumerate([(5, 7, 31), (40, 33, 150), (64, 70, 320)]):
            a, b = pair(names, seed, shape, kind, family)
            once = planes(a, b, order="blocks")
            with monkeypatch.context() as patched:
                patched.setattr(schedules, "has_powers", lambda _: False)
                in_turn = planes(a, b, order="blocks")
                patched.setattr(schedules, "marks", lambda *_, **__: None)
                one_by_one = planes(a, b, order="blocks")
            assert all(map(torch.equal, once, in_turn))
            assert all(map(torch.equal, once, one_by_one))


@pytest.mark.parametrize("family", FAMILIES)
def test_promoted_sums_are_the_same_without_marks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, names in enumerate(BLOCK_PAIRS):
        a, b = pair(names, seed, (40, 33, 600), "near", family)
        with_marks = planes(a, b, order="blocks")
        with monkeypatch.context() as patched:
            patched.setattr("narrowgauge.reference.bounds.promoted.marks", lambda *_, **__: None)
            assert all(map(torch.equal, with_marks, planes(a, b, order="blocks")))


@pytest.mark.parametrize("shape", [(1, 1), (3, 1 << 18), (1 << 18, 3), (700, 900), (0, 5), (5, 0), (1, 1 << 19)])
@pytest.mark.parametrize("each", [1, 8])
def test_tiles_have_every_element_once(shape: tuple[int, int], each: int) -> None:
    times = torch.zeros(shape, dtype=torch.uint8)
    for here in tiles(times, each):
        times[here] += 1
        assert times[here].numel() * each <= 1 << 18
    assert (times == 1).all()
