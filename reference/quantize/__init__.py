"""Quantize and dequantize: scales, elements, rotations, layouts, sections, delayed scaling."""
