"""The strength of the inputs of a contract: a table, inputs aimed at a mistake, and kernels with a mistake."""
