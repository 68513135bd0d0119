"""The operation update-scale."""
