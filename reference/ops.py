"""The doors of the reference, the same as those of `native.ops`."""

from reference.dequantize import dequantize
from reference.gemm import gemm, gemm_grouped
from reference.hadamard import transform
from reference.layout import swizzle, unswizzle
from reference.quantize import quantize, quantize_both, quantize_grouped
from reference.quantized import GroupedQuantized, Quantized
from reference.recipes import recipe

__all__ = [
    "GroupedQuantized", "Quantized", "declares", "dequantize", "gemm", "gemm_grouped", "quantize", "quantize_both",
    "quantize_grouped", "recipe", "swizzle", "transform", "unswizzle",
]  # fmt: skip

declares = {"transform": "butterfly"}
"""Rotations sum in the order of `reference.hadamard`."""
