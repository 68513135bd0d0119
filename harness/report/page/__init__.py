"""The page of a report: an HTML file without network access."""
