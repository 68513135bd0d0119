"""Random bytes of docs/numerics.md#stochastic-rounding, from Philox4x32-10 (Salmon et al., SC 2011)."""

from __future__ import annotations

import numpy as np


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Four 32-bit words of a counter of four words and a key of two words: ten rounds, products as whole numbers."""
    a, b, c, d = counter
    for number in range(10):
        k, m = ((word + number * weyl) % 2**32 for word, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        high, low = divmod(0xCD9E8D57 * c, 2**32)
        top, bottom = divmod(0xD2511F53 * a, 2**32)
        a, b, c, d = high ^ b ^ k, low, top ^ d ^ m, bottom
    return a, b, c, d


def philox_words(seed: int, offset: int, rows: int, columns: int, first: int = 0) -> np.ndarray:
    """Words of a matrix, uint32 (rows, 4·⌈columns/16⌉): four for a block of 16, counted along rows from `first`."""
    blocks = -(-columns // 16)
    words = np.zeros((rows, 4 * blocks), np.uint32)
    for i, j in np.ndindex(rows, blocks):
        number = first + i * blocks + j
        counter = (offset % 2**32, offset >> 32, number % 2**32, number >> 32)
        words[i, 4 * j : 4 * j + 4] = philox(counter, (seed % 2**32, seed >> 32))
    return words


def random_bytes(words: np.ndarray) -> np.ndarray:
    """Words (M, W), below 2^32, to a byte for each element, uint8 (M, 4·W): byte i of word j for element 4j + i."""
    return np.array([[int(word) >> 8 * i & 0xFF for word in row for i in range(4)] for row in words], np.uint8)
