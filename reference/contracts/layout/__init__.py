"""Numbers in another arrangement: columns of a matrix, and the places of rows in a cache."""
