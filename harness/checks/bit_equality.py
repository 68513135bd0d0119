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


def different_bits(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """bool mask of the elements with different bits, for tensors of equal shape and dtype. A NaN equals every NaN.

    Floating-point dtypes: float32, bfloat16 and float16.
    """
    if not left.is_floating_point():
        return left != right
    integer = ordinal.INTEGER_DTYPE[left.dtype]
    different = left.contiguous().view(integer) != right.contiguous().view(integer)
    return different & ~(left.isnan() & right.isnan())
