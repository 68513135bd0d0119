"""How codes lie in memory: two 4-bit codes a byte, the first element low."""

from __future__ import annotations

import torch


def pack(codes: torch.Tensor) -> torch.Tensor:
    """(M, K) codes below 16, uint8, to (M, ⌈K/2⌉) bytes: byte j holds element 2j low and 2j+1 high."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    # Seen as little-endian 16-bit words, a pair is low | high << 8; one shift brings the high nibble down.
    words = codes.contiguous().view(torch.int16)
    return (words | (words >> 4)).to(torch.uint8)


def unpack(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """(M, ⌈K/2⌉) bytes to (M, K) codes, K = `columns`: the inverse of `pack`."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).view(packed.shape[0], 2 * packed.shape[1])[:, :columns]
