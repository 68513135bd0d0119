"""Kernels that make and quantize a matrix row by row: norms, activations, rotary embedding."""
