"""Whether two kernels give equal bytes, and the choices that differ."""
