"""The operation quantize."""
