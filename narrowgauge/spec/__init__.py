"""Vocabulary of reference, kernels and harness: formats, recipes, results, orders of summation, argument checks."""

VERSION = "1.0.0"
"""The version of the package, shown by `narrowgauge --version` and in CHANGELOG.md."""
