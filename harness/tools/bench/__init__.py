"""How fast: every figure a ratio to a ceiling that was measured beside it, in the same rounds of the same run."""
