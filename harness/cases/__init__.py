"""Cases: the TOML files of the matrix, their schema, and what each case costs."""
