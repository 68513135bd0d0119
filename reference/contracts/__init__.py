"""Evaluation of contracts: an interval around every number of a correct kernel."""
