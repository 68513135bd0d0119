"""Cases on a GPU under compute-sanitizer."""
