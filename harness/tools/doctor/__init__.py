"""What a machine can do: tools that are tried, and errors of its GPU's functions."""
