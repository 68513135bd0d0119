"""The operation grouped-linear."""
