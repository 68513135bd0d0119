"""Arithmetic on numbers: decoding, encoding, roundings, exact sums, random words, maxima of blocks."""
