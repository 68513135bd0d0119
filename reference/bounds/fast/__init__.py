"""Faster equivalents of the plain running error bounds in the folder above, tested equal to the plain functions."""
