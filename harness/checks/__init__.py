"""Rules that compare a kernel's result with the expected result: one file for each rule."""
