"""Proved bounds of the outputs of correct kernels; docs/tolerance.md has the rules and the proofs."""
