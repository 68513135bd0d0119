"""The report of a bench: a table, a page, figures."""
