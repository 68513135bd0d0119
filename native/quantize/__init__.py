"""The Python side of the kernels that quantize, dequantize, rotate and lay out."""
