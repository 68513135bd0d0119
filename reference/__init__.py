"""The oracle: narrow formats, recipes and the operations on them, in PyTorch, right to the last bit.

The data are here and cost no import of torch; the doors (`quantize`, `dequantize`, `gemm`) are in `reference.ops`.
"""

from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, recipe

__all__ = ["Quantized", "Recipe", "recipe"]
