"""Products of quantized operands: exact sums, promoted sums, and tensor cores simulated bit for bit."""
