"""The operation pack-scales."""
