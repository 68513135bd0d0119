"""Philox4x32-10: Random123's known answers, an independent implementation in whole numbers, and every input bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.reference.numbers.philox import philox
from narrowgauge.reference.scalar import philox as scalar_philox

# kat_vectors of Random123: counter, key, words.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SETTINGS = settings(max_examples=300, deadline=None, derandomize=True, database=None)
WORD64 = st.integers(0, 2**64 - 1)


def hexadecimal(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


def signed(number: int) -> int:
    """The int64 with the bits of a number below 2^64."""
    return number - (number >> 63 << 64)


def words(seed: int, offset: int, subsequence: int) -> list[int]:
    found: list[int] = philox(seed, offset, torch.tensor([signed(subsequence)]))[0].tolist()
    return found


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_known_answers_of_random123(counter: str, key: str, answer: str) -> None:
    x, y, z, w = hexadecimal(counter)
    low, high = hexadecimal(key)
    assert tuple(words(low | high << 32, x | y << 32, z | w << 32)) == hexadecimal(answer)
    assert scalar_philox.philox((x, y, z, w), (low, high)) == hexadecimal(answer)


@SETTINGS
@given(WORD64, WORD64, WORD64)
def test_it_is_the_twin_in_whole_numbers(seed: int, offset: int, subsequence: int) -> None:
    halves = [(number % 2**32, number >> 32) for number in (offset, subsequence, seed)]
    assert tuple(words(seed, offset, subsequence)) == scalar_philox.philox(halves[0] + halves[1], halves[2])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_bit_of_a_counter_changes_every_word(which: int) -> None:
    start = [0x0123456789ABCDEF, 0x0F1E2D3C4B5A6978, 0x1122334455667788]
    before = words(*start)
    for bit in range(64):
        changed = list(start)
        changed[which] ^= 1 << bit
        assert all(one != other for one, other in zip(words(*changed), before, strict=True))


def test_subsequences_of_any_shape_are_independent() -> None:
    grid = torch.arange(2**31 - 6, 2**31 + 6).view(3, 2, 2)
    together = philox(7, 8, grid)
    assert together.dtype == torch.int64
    assert tuple(together.shape) == (3, 2, 2, 4)
    assert ((together >= 0) & (together < 2**32)).all()
    for n, four in zip(grid.ravel().tolist(), together.view(-1, 4).tolist(), strict=True):
        assert four == words(7, 8, n)
    assert tuple(philox(7, 8, grid[:0]).shape) == (0, 2, 2, 4)
