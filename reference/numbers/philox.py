"""Philox4x32-10, a counter-based generator: words depend on key and counter alone, so order and device do not matter.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox(seed: int, offset: int, subsequence: torch.Tensor, rounds: int = ROUNDS) -> torch.Tensor:
    """Four 32-bit words for every `subsequence` (int64, any shape): int64 (…, 4), each below 2^32.

    The key is the 64-bit seed, low word first. Words 0 and 1 of the counter are the offset, words 2 and 3 the
    subsequence. With fewer `rounds` the words differ. Source: docs/numerics.md#stochastic-rounding.
    """
    key = [seed & _LOW, seed >> 32 & _LOW]
    counter = [
        torch.full_like(subsequence, offset & _LOW), torch.full_like(subsequence, offset >> 32 & _LOW),
        subsequence & _LOW, subsequence >> 32 & _LOW,
    ]  # fmt: skip
    for _ in range(rounds):
        # int64 multiplication keeps the low 64 bits of the product; the mask undoes the shift's sign.
        low, high = (counter[i] * multiplier for i, multiplier in ((0, _MULTIPLIERS[0]), (2, _MULTIPLIERS[1])))
        mixed = (
            (high >> 32).bitwise_and_(_LOW).bitwise_xor_(counter[1]).bitwise_xor_(key[0]),
            (low >> 32).bitwise_and_(_LOW).bitwise_xor_(counter[3]).bitwise_xor_(key[1]),
        )
        counter = [mixed[0], high.bitwise_and_(_LOW), mixed[1], low.bitwise_and_(_LOW)]
        key = [(k + step) & _LOW for k, step in zip(key, _KEY_STEPS, strict=True)]
    return torch.stack(counter, dim=-1)
