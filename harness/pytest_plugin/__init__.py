"""The pytest plugin: case files are collected, each case is an item."""
