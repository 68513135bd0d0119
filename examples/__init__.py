"""Kernels to copy: backends in plain torch and in Triton, operations of your own, and a program that is watched."""
