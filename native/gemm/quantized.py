"""GEMM with a quantizing epilogue."""

from __future__ import annotations

import torch

from narrowgauge.native.gemm.gemm import gemm, path_for
from narrowgauge.native.gemm.operands import kernel_source, product, product_family
from narrowgauge.native.gemm.paths import PORTABLE
from narrowgauge.native.quantize.mx import scale_order, up_from
from narrowgauge.native.quantize.quantize import quantize
from narrowgauge.native.runtime.arguments import blocks_for, supported
from narrowgauge.native.runtime.launch import Argument, launch
from narrowgauge.native.runtime.structs import KernelStruct, Value
from narrowgauge.spec.arguments import check_scale
from narrowgauge.spec.formats import E8M0, FP32
from narrowgauge.spec.quantized import Quantized, codes_shape, scales_shape
from narrowgauge.spec.recipes import Recipe

_QUANTIZER = KernelStruct("gemm/portable/gemm_quantized.cuh", "QuantizerParameters")
_TILE = 128
_THREADS = 256


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

    One launch if the portable kernels compute the GEMM, else a GEMM and a quantization. The bytes are equal to
    `quantize(gemm(…), recipe)`. `scale`: float32 (1,), the encode scale of delayed scaling. Raises
    NotImplementedError if scales depend on the whole output, or codes on random bits, and as `gemm` and `quantize` do.
    """
    recipe = supported(recipe)
    block = _scale_block(recipe)
    family = product_family(a.recipe, b.recipe)
    terms = product(a, b, family, out_dtype=out_dtype, c=c, bias=bias)
    check_scale(scale, 1, recipe)
    device, shape = a.codes.device, (terms.m, terms.n)
    if path_for(a, b, family) != PORTABLE:
        return quantize(gemm(a, b, out_dtype=out_dtype, c=c, bias=bias), recipe, scale=scale)
    codes = torch.empty(codes_shape(shape, recipe), dtype=torch.uint8, device=device)
    scales_dtype = torch.float32 if recipe.scale is FP32 else torch.uint8
    scales = torch.empty(scales_shape(shape, recipe), dtype=scales_dtype, device=device)
    amax = torch.zeros(1, dtype=torch.float32, device=device) if recipe.whole else None
    encode = torch.empty(1, dtype=torch.float32, device=device) if recipe.whole else None
    quantizer = _QUANTIZER(
        element=recipe.element.name, block=block, propagate_nan=recipe.nan == "propagate",
        **_scale_parameters(recipe, out_dtype), given=scale, scales=scales, amax=amax, encode=encode,
    )  # fmt: skip
    arguments: list[Argument] = [terms.parameters(codes), quantizer]
    if family == "nvfp4":
        arguments.append(terms.alpha_parameters())
    grid = (blocks_for(terms.n, _TILE), blocks_for(terms.m, _TILE))
    source = kernel_source(family, "gemm_quantized")
    launch(source, f"gemm_quantized_{family}", grid, (_THREADS,), arguments, device=device)
    return Quantized(codes, scales, amax, recipe, shape, encode)


def _scale_block(recipe: Recipe) -> str:
    """Enumerator of ScaleBlock of the output. Raises NotImplementedError if the kernels cannot make such an output."""
    if recipe.rounding == "stochastic":
        raise NotImplementedError(
            f"gemm_quantized rounds to nearest even, and recipe {recipe} stochastically; use gemm and then quantize"
        )
    if recipe.tensor_scale not in ("none", "given"):
        raise NotImplementedError(
            f"gemm_quantized makes codes with the output, but a scale of recipe {recipe} depends on the whole output; "
            "use gemm and then quantize"
        )
    if recipe.whole:
        return "FP8_TENSOR"
    return ("MX" if recipe.scale is E8M0 else "FP8") + ("_TILE" if recipe.block[0] > 1 else "_LINE")


def _scale_parameters(recipe: Recipe, out_dtype: torch.dtype) -> dict[str, Value]:
    """Fields of QuantizerParameters for the scale of an amax, of MX and of FP8."""
    mx = recipe.scale is E8M0
    largest = torch.finfo(out_dtype if recipe.largest_scale == "input" else torch.float32).max
    fp8: dict[str, Value] = {
        "largest_element": recipe.element.max, "smallest_amax": recipe.smallest_amax, "largest_scale": largest,
        "power_of_two": recipe.scale_rounding == "down",
    }  # fmt: skip
    return {
        "scale_order": scale_order(recipe) if mx else "AMAX_TIMES_RECIPROCAL",
        "up_from": up_from(recipe) if mx else 0,
        "scale": fp8,
    }
