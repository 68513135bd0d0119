"""Ordinals: integers in the order of the numbers of a format. Neighbouring numbers differ by 1."""

from __future__ import annotations

import torch

from narrowgauge.spec.formats import Format

INTEGER_DTYPE = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""Integer dtype of the same size, to view the bits of a floating-point dtype."""


def float_ordinals(x: torch.Tensor) -> torch.Tensor:
    """int64 ordinals of float32, bfloat16 or float16 numbers. +0 and −0 have ordinal 0."""
    bits = x.contiguous().view(INTEGER_DTYPE[x.dtype]).long()
    magnitude = bits & ((1 << (x.element_size() * 8 - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def code_ordinals(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """int64 ordinals of codes (uint8). +0 and −0 have ordinal 0; NaN in place of −0 follows the largest number."""
    wide = codes.long()
    if not fmt.signed:
        return wide
    if fmt.complement:
        return torch.where(wide >= fmt.sign_code, wide - fmt.codes, wide)
    magnitude = wide & (fmt.sign_code - 1)
    ordinals = torch.where((wide & fmt.sign_code) != 0, -magnitude, magnitude)
    return ordinals if fmt.negative_zero else ordinals.masked_fill_(wide == fmt.sign_code, fmt.max_code + 1)


def signed_float_ordinals(x: torch.Tensor) -> torch.Tensor:
    """`float_ordinals`, with −0 and all numbers below it lowered by 1: −0 lies below +0."""
    return float_ordinals(x) - x.signbit().long()


def signed_code_ordinals(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`code_ordinals`, with −0 and all numbers below it lowered by 1: −0 lies below +0."""
    return code_ordinals(codes, fmt) - (codes & fmt.sign_code != 0).long()
