"""The Python side of the GEMM kernels."""
