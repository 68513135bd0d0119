"""What `narrowgauge bench` asks of an operation, and judging of timed outputs."""
