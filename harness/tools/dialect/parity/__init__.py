"""Whether two kernels give equal bytes, and the choice in which they differ."""
