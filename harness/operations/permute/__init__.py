"""Rows of tokens copied to the sections of their experts."""
