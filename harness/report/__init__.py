"""The report of a run: a page, tables, and summaries for a terminal and for GitHub."""
