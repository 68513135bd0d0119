"""The operation gemm-quantized."""
