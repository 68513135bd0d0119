"""The doors of the reference, the same as those of `native.ops`."""

from narrowgauge.reference.experts.permute import permute
from narrowgauge.reference.experts.products import gemm_contiguous, gemm_masked
from narrowgauge.reference.gemm.gemm import gemm, gemm_grouped
from narrowgauge.reference.gemm.quantized import gemm_quantized
from narrowgauge.reference.modules import GroupedLinear, LayerNormLinear, Linear, MoELayer, TransformerLayer
from narrowgauge.reference.quantize.delayed import update_scale
from narrowgauge.reference.quantize.dequantize import dequantize
from narrowgauge.reference.quantize.hadamard import transform
from narrowgauge.reference.quantize.layout import pack_scales, swizzle, unpack_scales, unswizzle
from narrowgauge.reference.quantize.quantize import quantize, quantize_both, quantize_grouped
from narrowgauge.reference.quantize.sections import pad_sections, unpad_sections
from narrowgauge.spec.quantized import GroupedQuantized, Quantized
from narrowgauge.spec.recipes import find_recipe

__all__ = [
    "GroupedLinear", "GroupedQuantized", "LayerNormLinear", "Linear", "MoELayer", "Quantized", "TransformerLayer",
    "declares", "dequantize", "find_recipe", "gemm", "gemm_contiguous", "gemm_grouped", "gemm_masked", "gemm_quantized",
    "pack_scales", "pad_sections", "permute", "quantize", "quantize_both", "quantize_grouped", "swizzle", "transform",
    "unpack_scales", "unpad_sections", "unswizzle", "update_scale",
]  # fmt: skip

declares = {"transform": "butterfly"}
"""Rotations sum in the order of `reference.quantize.hadamard`."""
