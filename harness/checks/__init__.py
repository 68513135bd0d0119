"""Rules that compare a kernel's result with the expected result: a file per rule."""
