"""Known deviations of element codes."""
