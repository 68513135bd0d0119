"""The operation gemm."""
