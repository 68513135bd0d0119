"""Cases: a class per operation, the TOML files of the matrix, input families, work and memory of a case."""
