"""Proved bounds of a GEMM: the outputs that a correct kernel can give."""
