"""A finding: what a person needs to see of a wrong stage, as plain data.

Keys: stage; rule; sentence; elements, a list of views of single elements (`which` is "first" or "worst", then
coordinates, input, expected and actual in bits and as values, scale); modulo, {"row": {16: counts, 128: counts},
"column": …}; heat, {"rows": tile height, "columns": tile width, "counts": rows of mismatch counts a tile}.
"""
