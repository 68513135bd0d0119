"""The operation transformer-layer."""
