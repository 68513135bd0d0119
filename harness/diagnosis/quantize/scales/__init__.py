"""Known mistakes in amaxes and scales."""
