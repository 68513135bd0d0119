"""Products of quantized operands: exact sums, promoted sums, and sums of simulated tensor cores."""
