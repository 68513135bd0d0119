"""Codes to values: one table look-up, exact for every format."""

from __future__ import annotations

from functools import lru_cache

import torch

from narrowgauge.spec.formats import Format


@lru_cache(maxsize=64)
def _table(fmt: Format, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.tensor(fmt.values, dtype=torch.float64).to(dtype).to(device)


def decode(codes: torch.Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of `codes` (uint8, any shape, one code an element), in float32 or float64, both exact.

    Source: `Format.value`. Raises TypeError for another dtype of the codes, IndexError for a code that the
    format does not have.
    """
    if codes.dtype != torch.uint8:
        raise TypeError(f"decode takes uint8 codes of {fmt.name}, not {codes.dtype}")
    table = _table(fmt, dtype, str(codes.device))
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


@lru_cache(maxsize=16)
def _pair_table(fmt: Format, dtype: torch.dtype, device: str) -> torch.Tensor:
    """The two values of every byte as one complex number, which a look-up reads at once, five times faster."""
    low = torch.arange(256) & 0xF
    high = torch.arange(256) >> 4
    values = torch.tensor(fmt.values, dtype=torch.float64)
    return torch.view_as_complex(torch.stack([values[low], values[high]], dim=1).to(dtype).to(device))


def decode_packed(packed: torch.Tensor, fmt: Format, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of 4-bit codes packed two a byte, first element low: (M, ⌈K/2⌉) uint8 to (M, K), K = `columns`."""
    pairs = _pair_table(fmt, dtype, str(packed.device)).index_select(0, packed.reshape(-1).int())
    return torch.view_as_real(pairs).view(packed.shape[0], 2 * packed.shape[1])[:, :columns]


def decode_stored(codes: torch.Tensor, fmt: Format, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of codes as they are stored, two a byte where they have 4 bits, else one: (M, K), K = `columns`."""
    return decode_packed(codes, fmt, columns, dtype) if fmt.bits == 4 else decode(codes, fmt, dtype)
