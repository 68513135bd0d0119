"""Tools around the harness: bench, train, mutants, sanitize, soak, dialect, merge, show."""
