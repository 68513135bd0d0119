"""The GEMM in the order that gemm_nvfp4.cu declares, in NumPy: what it must give bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from native.ops import GroupedQuantized, Quantized
from reference.formats import E2M1, E4M3
from reference.layout import linear_scales
from tests.reference.scalar import alpha

f32 = np.float32


def blocks(q: Quantized) -> tuple[np.ndarray, np.ndarray]:
    """Elements (rows, blocks, 16), zero behind the last column, and block scales (rows, blocks), both float64."""
    codes, scales = q.codes.cpu().numpy(), linear_scales(q).cpu().numpy()
    rows, columns = q.shape
    unpacked = np.stack([codes & 0xF, codes >> 4], axis=-1).reshape(rows, 2 * codes.shape[1])[:, :columns]
    padded = np.pad(unpacked, ((0, 0), (0, -columns % 16)))
    return np.array(E2M1.values)[padded].reshape(rows, scales.shape[1], 16), np.array(E4M3.values)[scales]


def gemm(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Blocks of 16 exact, added in order of K with one float32 rounding each; then α, c, bias and one cast."""
    (left, left_scales), (right, right_scales) = blocks(a), blocks(b)
    acc = np.zeros((a.shape[0], b.shape[0]), f32)
    with np.errstate(all="ignore"):
        for k in range(left.shape[1]):
            exact = (left[:, k] @ right[:, k].T) * np.outer(left_scales[:, k], right_scales[:, k])
            term = exact.astype(f32)
            assert np.array_equal(term, exact, equal_nan=True), "a block's term fits float32"
            acc = acc + term
        left_amax, right_amax = (q.amax.cpu().numpy() for q in (a, b))
        most = (int(a.recipe.scale_max), int(b.recipe.scale_max))
        y = torch.from_numpy(alpha(left_amax[:, None], right_amax, a.recipe.alpha, most) * acc)
    for addend in (c, bias):
        if addend is not None:
            y = y + addend.cpu().float()
    return y.to(out_dtype)


def gemm_grouped(
    a: GroupedQuantized,
    b: Sequence[Quantized],
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each section by itself, one below the other."""
    sizes = a.sizes.tolist()
    parts = [
        gemm(section, b[number], out_dtype=out_dtype, c=added, bias=None if bias is None else bias[number])
        for number, (section, added) in enumerate(
            zip(a.sections(), [None] * len(sizes) if c is None else c.split(sizes), strict=True)
        )
    ]
    return torch.cat(parts)
