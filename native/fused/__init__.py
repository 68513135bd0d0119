"""Kernels that make a matrix row by row and quantize it: norms, activations, rotary embedding."""
