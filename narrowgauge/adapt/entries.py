"""Entries of a cache that hold codes, scales and plain numbers of a row, one behind another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

_DTYPES = {"uint8": torch.uint8, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Part:
    """Numbers of one kind in an entry."""

    name: str
    count: int
    dtype: Literal["uint8", "float32", "bfloat16"]
    """uint8: codes of one byte."""

    @property
    def size(self) -> int:
        """Bytes of the part."""
        return self.count * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Entry:
    """The parts of an entry, in order of memory."""

    name: str
    parts: tuple[Part, ...]
    meaning: str
    users: str
    """Libraries with these entries."""
    version: str
    """Release whose code has the entries."""

    @property
    def size(self) -> int:
        """Bytes of an entry."""
        return sum(part.size for part in self.parts)


ENTRIES: Mapping[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("mla-656", (Part("codes", 512, "uint8"), Part("scales", 4, "float32"), Part("rope", 64, "bfloat16")),
              "512 codes of E4M3 in groups of 128, their scales, and the rotated part of the key", "vLLM (fp8_ds_mla)",
              "vLLM 0.33.0"),
    )
}  # fmt: skip
"""Entries by name."""


def entry_parts(stored: torch.Tensor, entry: str | Entry) -> dict[str, torch.Tensor]:
    """The parts of entries (…, bytes of an entry), uint8: (…, count) in the dtype of each part, by name.

    Raises ValueError for an unknown name and another number of bytes, TypeError for another dtype.
    """
    found = _found(entry)
    if stored.element_size() != 1:
        raise TypeError(f"entries are bytes, not {str(stored.dtype).removeprefix('torch.')}; give view(torch.uint8)")
    if not stored.dim() or stored.shape[-1] != found.size:
        raise ValueError(f"entries {found.name} have {found.size} bytes, not shape {tuple(stored.shape)}")
    parts = torch.split(stored.view(torch.uint8), [part.size for part in found.parts], dim=-1)
    return {
        part.name: piece.contiguous().view(_DTYPES[part.dtype])
        for part, piece in zip(found.parts, parts, strict=True)
    }  # fmt: skip


def entries_of(parts: Mapping[str, torch.Tensor], entry: str | Entry) -> torch.Tensor:
    """Entries, uint8 (…, bytes of an entry), of their parts: the inverse of `entry_parts`.

    Raises ValueError for an unknown name, a missing part and another length, TypeError for another dtype.
    """
    found = _found(entry)
    if parts.keys() != {part.name for part in found.parts}:
        raise ValueError(f"entries {found.name} have {', '.join(part.name for part in found.parts)}, not {set(parts)}")
    pieces = []
    for part in found.parts:
        given = parts[part.name]
        if given.dtype != _DTYPES[part.dtype] and not (part.dtype == "uint8" and given.element_size() == 1):
            raise TypeError(f"{part.name} of {found.name} is {part.dtype}, not {given.dtype}")
        if given.shape[-1] != part.count:
            raise ValueError(f"{part.name} of {found.name} has {part.count} numbers, not shape {tuple(given.shape)}")
        pieces.append(given.contiguous().view(torch.uint8))
    return torch.cat(pieces, -1)


def _found(entry: str | Entry) -> Entry:
    if isinstance(entry, Entry):
        return entry
    if entry not in ENTRIES:
        raise ValueError(f"entry is {entry!r}; it can be {', '.join(map(repr, ENTRIES))}, or an Entry")
    return ENTRIES[entry]
