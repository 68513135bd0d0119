"""`narrowgauge dialect`: the rule of a quantizer, fitted to its bytes."""
