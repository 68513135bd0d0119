"""Tensors in another arrangement: columns in another order, sequences in pages, and the attention to their tokens."""
