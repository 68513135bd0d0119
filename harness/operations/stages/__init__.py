"""The shared stages of operations, and their outcome."""
