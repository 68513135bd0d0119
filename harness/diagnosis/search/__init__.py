"""The state of a search for causes: its history and its time limit."""
