"""Distances in steps: numbers as integers in the order of their values, so that neighbours differ by 1."""

from __future__ import annotations

import torch

from narrowgauge.spec.formats import Format

INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""The integer dtype that holds a number's bits."""


def of_floats(x: torch.Tensor) -> torch.Tensor:
    """int64 ordinals of float32, bfloat16 or float16 numbers; +0 and −0 are both 0."""
    bits = x.contiguous().view(INTEGER[x.dtype]).long()
    magnitude = bits & ((1 << (x.element_size() * 8 - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def of_codes(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """int64 ordinals of codes (uint8); +0 and −0 are both 0."""
    wide = codes.long()
    if not fmt.signed:
        return wide
    magnitude = wide & (fmt.sign_code - 1)
    return torch.where((wide & fmt.sign_code) != 0, -magnitude, magnitude)


def signed_floats(x: torch.Tensor) -> torch.Tensor:
    """As `of_floats`, but −0 lies below +0, and what is below it one lower."""
    return of_floats(x) - x.signbit().long()


def signed_codes(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """As `of_codes`, but −0 lies below +0, and what is below it one lower."""
    return of_codes(codes, fmt) - (codes & fmt.sign_code != 0).long()
