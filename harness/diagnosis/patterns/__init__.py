"""Patterns: the places and classes that all wrong elements of a stage share."""
