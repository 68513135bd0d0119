"""Report of a bench: table, page, plots."""
