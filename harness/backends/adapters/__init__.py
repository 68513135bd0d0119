"""Backends that call other libraries: a file per library, which imports the library on use only."""
