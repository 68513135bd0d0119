"""Quantize and dequantize: steps, scales, elements, transforms, layouts, sections, delayed scaling."""
