"""Diagnosis of high-precision stages: known wrong formulas, forward and backward."""
