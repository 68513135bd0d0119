"""Known deviations of quantizers."""
