"""The kernels under test, through CuPy on a GPU and through the host's C++ compiler on a CPU: `native.ops`."""
