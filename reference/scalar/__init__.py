"""docs/numerics.md in plain Python, one number at a time: a second definition, to read beside the page.

The tests check the vectorised reference against this package. It imports nothing of the project but `narrowgauge.spec`,
and the vectorised reference does not import it (tests/test_imports.py). A number is a NumPy float32, whose operations
round to float32, or an exact fraction. "Step n" is step n of the section of docs/numerics.md that the module names.
"""
