"""Vocabulary of reference, kernels and harness: formats, recipes, results, orders of summation, argument checks."""
