"""The operations: each runs a method of a backend and judges the result stage by stage."""
