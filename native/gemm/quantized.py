"""GEMM whose output is quantized by the kernel that makes it."""

from __future__ import annotations

import numpy as np
import torch

from narrowgauge.native.gemm.gemm import gemm
from narrowgauge.native.gemm.operands import element_of, epilogue, product_arguments, rule_of, source_of
from narrowgauge.native.gemm.paths import PORTABLE, path_of
from narrowgauge.native.quantize.mx import scale_rule
from narrowgauge.native.quantize.quantize import quantize
from narrowgauge.native.runtime.arguments import blocks_for, supported
from narrowgauge.native.runtime.launch import Argument, launch
from narrowgauge.spec.arguments import check_scale
from narrowgauge.spec.formats import E8M0, FP32
from narrowgauge.spec.quantized import Quantized, codes_shape, scales_shape
from narrowgauge.spec.recipes import Recipe

_TILE = 128
_THREADS = 256
_MX_LINES, _MX_TILES, _FP8_LINES, _FP8_TILES, _FP8_TENSOR = range(5)


def gemm_quantized(
    a: Quantized,
    b: Quantized,
    recipe: str | Recipe,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> Quantized:
    """a @ b.T (+ c) (+ bias), rounded to `out_dtype`, (M, N), quantized by `recipe` along N.

    One launch of the portable kernels; what other ones multiply is quantized behind them. The bytes are those of
    `quantize(gemm(…), recipe)`. `scale`: float32 (1,), the encode scale of delayed scaling. Raises NotImplementedError
    where scales depend on the whole output, or codes on random bits, and as `gemm` and `quantize` do.
    """
    r = supported(recipe)
    kind = _kind(r)
    rule = rule_of(a.recipe, b.recipe)
    (m, k), n = a.shape, b.shape[0]
    operands, factors = product_arguments(a, b)
    sizes = epilogue((m, n, k), out_dtype, c, bias)
    check_scale(scale, 1, r)
    device = a.codes.device
    if path_of(m, n, k, rule, device) != PORTABLE:
        return quantize(gemm(a, b, out_dtype=out_dtype, c=c, bias=bias), r, scale=scale)
    codes = torch.empty(codes_shape((m, n), r), dtype=torch.uint8, device=device)
    scales = torch.empty(
        scales_shape((m, n), r), dtype=torch.float32 if r.scale is FP32 else torch.uint8, device=device
    )
    amax = torch.zeros(1, dtype=torch.float32, device=device) if r.whole else None
    encode = torch.empty(1, dtype=torch.float32, device=device) if r.whole else None
    launch(
        source_of(rule, "gemm_quantized"),
        f"gemm_quantized_{rule}",
        (blocks_for(n, _TILE), blocks_for(m, _TILE)),
        (_THREADS,),
        (*operands, c, bias, codes, *sizes, element_of(r), np.int32(kind), np.int32(r.nan == "propagate"),
         *_scales_of(r, out_dtype), scale, scales, amax, encode, *factors),
        device=device,
    )  # fmt: skip
    return Quantized(codes, scales, amax, r, (m, n), encode)


def _kind(r: Recipe) -> int:
    """What shares a scale of the output, for the kernels. Raises NotImplementedError where none of them can make it."""
    if r.rounding == "stochastic":
        raise NotImplementedError(
            f"gemm_quantized rounds to nearest even, and recipe {r} stochastically; use gemm and then quantize"
        )
    if r.tensor_scale not in ("none", "given"):
        raise NotImplementedError(
            f"gemm_quantized makes codes with the output, but a scale of recipe {r} depends on the whole output; "
            "use gemm and then quantize"
        )
    if r.whole:
        return _FP8_TENSOR
    tiles = r.block[0] > 1
    if r.scale is E8M0:
        return _MX_TILES if tiles else _MX_LINES
    return _FP8_TILES if tiles else _FP8_LINES


def _scales_of(r: Recipe, out_dtype: torch.dtype) -> list[Argument]:
    """How an amax becomes a scale: what MX asks for, then FP8."""
    rule = scale_rule(r) if r.scale is E8M0 else (np.int32(0), np.int32(0))
    largest = torch.finfo(out_dtype if r.largest_scale == "input" else torch.float32).max
    return [
        *rule, np.float32(r.element.max), np.float32(r.smallest_amax), np.float32(largest),
        np.int32(r.scale_rounding == "down"),
    ]  # fmt: skip
