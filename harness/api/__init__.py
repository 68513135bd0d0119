"""Functions of the public package `narrowgauge` that judge results in the process of the caller."""
