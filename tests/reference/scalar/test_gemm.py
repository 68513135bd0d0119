"""`scalar.gemm` beside the vectorised GEMM: α, the epilogue, and the casts."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowgauge.reference.ops import gemm, quantize
from narrowgauge.reference.scalar.gemm import alpha, output
from narrowgauge.reference.scalar.rounding import f32
from tests.reference.narrow import values

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4@te-native", "mxfp8-e4m3"])
def test_an_output_is_the_exact_sum_through_the_steps(name: str, dtype: str) -> None:
    generator = torch.Generator().manual_seed(5)
    a, b = (quantize(torch.randn(3, 64, generator=generator), name) for _ in range(2))
    left, right = values(a).tolist(), values(b).tolist()
    c, bias = torch.randn(3, 3, generator=generator), torch.randn(3, generator=generator)
    y = gemm(a, b, c=c, bias=bias, out_dtype=DTYPES[dtype])
    for i, j in np.ndindex(3, 3):
        factor, total = f32(1), sum(Fraction(p) * Fraction(q) for p, q in zip(left[i], right[j], strict=True))
        if a.amax is not None and b.amax is not None:
            factor = alpha(f32(a.amax.item()), f32(b.amax.item()), a.recipe.alpha)
        assert y[i, j].item() == output(Fraction(total), factor, c[i, j].item(), bias[j].item(), dtype)
