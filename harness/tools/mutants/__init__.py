"""Mutants: wrong kernels that the quick tier has to find, each a declared change of a real kernel file.

The *.toml files hold them by subject. `narrowgauge mutants` runs them all.
"""
