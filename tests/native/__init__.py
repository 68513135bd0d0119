"""Tests of the native kernels: the host model of a GPU, the toolchains, the kernels against the reference."""
