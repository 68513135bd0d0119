"""Patterns: places and classes that contain all wrong elements of a stage."""
