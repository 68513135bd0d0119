"""`narrowgauge checkpoint`: quantized weights in files, judged without and with their weights."""
