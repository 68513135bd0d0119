"""The oracle, in PyTorch, right to the last bit. `reference.ops` has its operations."""
