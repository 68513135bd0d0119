"""The operation transform."""
