"""Inputs: the tensors of a case, made from its id or captured in a file."""
