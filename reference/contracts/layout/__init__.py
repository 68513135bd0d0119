"""Numbers in another arrangement: columns of a matrix, the places of rows in a cache, and the attention to them."""
