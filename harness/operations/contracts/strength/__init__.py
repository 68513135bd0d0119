"""What the inputs of a contract can show: a table, inputs that are aimed at a mistake, and kernels with a mistake."""
