"""The pytest plugin: collects case files, with each case as an item."""
