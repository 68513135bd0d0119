"""The operation gemm-grouped."""
