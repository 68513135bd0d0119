"""Power of a user's own test: known wrong results that the test accepts."""
