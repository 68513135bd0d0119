"""Equality of bits, in which a NaN equals every NaN."""

from __future__ import annotations

from functools import cache
from math import isnan

import torch

from narrowgauge.harness.backends.guarded_memory import element_bytes
from narrowgauge.harness.checks import ordinal
from narrowgauge.spec.formats import Format


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have equal shape, dtype and bits. A NaN equals every NaN; +0 and −0 differ."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not left.is_floating_point():
        return torch.equal(left, right)
    return not bool(different_bits(left, right).any())


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of equal dtype have equal shape and bytes. Words of 8 bytes are compared: `torch.equal` takes
    about as long for a byte as for a word."""
    if left.shape != right.shape:
        return False
    ends = [element_bytes(t).view(-1) for t in (left, right)]
    if not any(end.storage_offset() % 8 for end in ends):
        size = ends[0].numel() // 8 * 8
        if not torch.equal(*(end[:size].view(torch.int64) for end in ends)):
            return False
        ends = [end[size:] for end in ends]
    return torch.equal(*ends)


def with_nans_of(expected: torch.Tensor, actual: torch.Tensor, fmt: Format | None = None) -> torch.Tensor:
    """`actual` with the bits of `expected` where both are NaN: a correct NaN has any sign and payload.

    Tensors of shapes that broadcast and of equal dtype: floating-point numbers, or codes (uint8, a byte for each
    element) of the format `fmt`.
    """
    if actual.is_floating_point():
        wanted, found = expected.isnan(), actual.isnan
    elif fmt is None or fmt.nan_code is None:
        return actual
    else:
        nan = _nan_codes(fmt, expected.device)
        wanted, found = nan[expected.long()], lambda: nan[actual.long()]
    return torch.where(wanted & found(), expected, actual) if bool(wanted.any()) else actual


@cache
def _nan_codes(fmt: Format, device: torch.device) -> torch.Tensor:
    """bool (256,): the codes of a format of 8 bits that are NaN."""
    return torch.tensor([isnan(fmt.value(code)) for code in range(256)], device=device)


def different_bits(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """bool mask of the elements with different bits, for tensors of equal shape and dtype. A NaN equals every NaN.

    Floating-point dtypes: float32, bfloat16 and float16.
    """
    if not left.is_floating_point():
        return left != right
    integer = ordinal.INTEGER_DTYPE[left.dtype]
    different = left.contiguous().view(integer) != right.contiguous().view(integer)
    return different & ~(left.isnan() & right.isnan())
