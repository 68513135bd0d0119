"""The doors of the reference, the same as those of `native.ops`."""

from reference.dequantize import dequantize
from reference.gemm import gemm
from reference.quantize import quantize
from reference.quantized import Quantized
from reference.recipes import recipe

__all__ = ["Quantized", "dequantize", "gemm", "quantize", "recipe"]
