"""Judging the results of a contract."""
