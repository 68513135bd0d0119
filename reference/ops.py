"""The doors of the reference, the same as those of `native.ops`."""

from reference.delayed import update_scale
from reference.dequantize import dequantize
from reference.gemm import gemm, gemm_grouped
from reference.gemm_quantized import gemm_quantized
from reference.hadamard import transform
from reference.layout import swizzle, unswizzle
from reference.modules import GroupedLinear, LayerNormLinear, Linear, TransformerLayer
from reference.quantize import quantize, quantize_both, quantize_grouped
from reference.quantized import GroupedQuantized, Quantized
from reference.recipes import recipe
from reference.sections import pad_sections, unpad_sections

__all__ = [
    "GroupedLinear", "GroupedQuantized", "LayerNormLinear", "Linear", "Quantized", "TransformerLayer", "declares",
    "dequantize", "gemm", "gemm_grouped", "gemm_quantized", "pad_sections", "quantize", "quantize_both",
    "quantize_grouped", "recipe", "swizzle", "transform", "unpad_sections", "unswizzle", "update_scale",
]  # fmt: skip

declares = {"transform": "butterfly"}
"""Rotations sum in the order of `reference.hadamard`."""
