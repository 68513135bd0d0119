"""Known deviations of amaxes and scales."""
