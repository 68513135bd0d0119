"""Single numbers: codes to values and back, roundings, exact sums, random words, blocks along a row."""
