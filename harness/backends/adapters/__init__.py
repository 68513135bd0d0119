"""Backends of libraries: a file per library, which imports the library on use only."""
