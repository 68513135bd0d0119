"""Mutants: wrong kernels that the quick tier must detect, each a declared change of a real kernel file.

`tests/mutants/kernels/*.toml` hold the mutants by subject. `narrowgauge mutants` runs all mutants.
"""
