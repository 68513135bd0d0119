"""The operation linear."""
