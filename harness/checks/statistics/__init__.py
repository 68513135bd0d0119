"""Statistical tests, and the probability of a false alarm of a run."""
