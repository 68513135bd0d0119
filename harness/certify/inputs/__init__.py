"""Inputs of a proof: blocks that hold every pair of a number and a scale, and random bytes beside them."""
