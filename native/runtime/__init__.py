"""Compile, cache and launch kernels: NVRTC and CuPy on a GPU, the C++ compiler on a CPU."""
