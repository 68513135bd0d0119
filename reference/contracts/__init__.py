"""Evaluation of contracts: the interval of every number that a correct kernel may hold."""
