"""The state of a search for causes: its history and its limit of work."""
