"""What is run and judged: one file an operation, each a function of a case, its inputs and a backend."""
