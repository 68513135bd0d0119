"""The operation quantize-grouped."""
