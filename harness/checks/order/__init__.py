"""Finding the order of a GEMM's additions by probes."""
