"""Backends: loaded by name, called on guarded memory, their results brought into shape."""
