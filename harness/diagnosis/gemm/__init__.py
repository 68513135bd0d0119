"""Known deviations of products."""
