"""Equality of bits, in which a NaN equals every NaN."""

from __future__ import annotations

import torch

from narrowgauge.harness.checks import ordinal


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
    ends = [t.contiguous().view(-1).view(torch.uint8) for t in (left, right)]
    if not any(end.storage_offset() % 8 for end in ends):
        size = ends[0].numel() // 8 * 8
        if not torch.equal(*(end[:size].view(torch.int64) for end in ends)):
            return False
        ends = [end[size:] for end in ends]
    return torch.equal(*ends)


def different_bits(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """bool mask of the elements with different bits, for tensors of equal shape and dtype. A NaN equals every NaN.

    Floating-point dtypes: float32, bfloat16 and float16.
    """
    if not left.is_floating_point():
        return left != right
    integer = ordinal.INTEGER_DTYPE[left.dtype]
    different = left.contiguous().view(integer) != right.contiguous().view(integer)
    return different & ~(left.isnan() & right.isnan())
