"""Searches for causes: their history, their limit of work, and the rule nearest to all cases of a quantizer."""
