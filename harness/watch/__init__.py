"""Judging calls of a running program."""
