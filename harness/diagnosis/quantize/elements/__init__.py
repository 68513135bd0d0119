"""Known mistakes in element codes."""
