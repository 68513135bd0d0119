"""Figures of error and tolerance: bounds of a GEMM, distances of tensors, expected errors."""
