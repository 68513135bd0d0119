"""Attention over a paged, quantized cache, and the cache's writes and reads."""
