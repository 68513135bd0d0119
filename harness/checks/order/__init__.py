"""Finding the order in which a GEMM adds, by probing it."""
