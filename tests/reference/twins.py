"""Comparisons of a `Quantized` with `narrowgauge.reference.scalar`, or with another `Quantized`, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from narrowgauge.reference.quantize.layout import rowwise_codes, unpack
from narrowgauge.reference.scalar import hadamard, nvfp4, philox
from narrowgauge.spec.quantized import Quantized
from tests.golden import bits


def elements(q: Quantized) -> torch.Tensor:
    """Codes of `q`, one in a byte: uint8 (M, K)."""
    return unpack(q.codes, q.shape[1])


def assert_same(one: Quantized | None, other: Quantized | None) -> None:
    """Both have the same codes, scales, amax and tensor scale, bit for bit, in the same layout."""
    assert one is not None
    assert other is not None
    assert (one.shape, one.swizzled) == (other.shape, other.swizzled)
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.scales, other.scales)
    for mine, theirs in ((one.amax, other.amax), (one.tensor_scale, other.tensor_scale)):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(bits(mine), bits(theirs))


def rotated(x: torch.Tensor, group: int, *, signs: bool = True) -> np.ndarray:
    """`x` (M, K), bfloat16, rotated by the scalar definition: float32 (M, K)."""
    groups = x.float().numpy().reshape(-1, group)
    return np.array([hadamard.rotate(list(g), signs=signs) for g in groups], np.float32).reshape(x.shape)


def assert_twin(
    q: Quantized, x: torch.Tensor, *, amax: torch.Tensor | None = None, words: torch.Tensor | np.ndarray | None = None
) -> None:
    """`q` has the codes, scales and amax that the scalar definition of its recipe gives for `x`."""
    transform = q.recipe.transform
    matrix = x.float().numpy() if transform is None else rotated(x, transform.group, signs=transform.signs != 0)
    random = None if words is None else philox.random_bytes(np.asarray(words).astype(np.int64) & 0xFFFFFFFF)
    given = None if amax is None else amax.numpy()
    codes, scales, own = nvfp4.quantize(matrix, q.recipe, amax=given, random=random)
    np.testing.assert_array_equal(q.scales.numpy(), scales)
    np.testing.assert_array_equal(q.codes.numpy(), codes)
    np.testing.assert_array_equal(q.amax, own)


def rowwise_elements(q: Quantized) -> torch.Tensor:
    """Codes (M, K) of `q`, one in a byte, along its rows, also if `q` stores the transpose."""
    codes = rowwise_codes(q)
    return unpack(codes, q.shape[1]) if q.recipe.element.bits == 4 else codes
