"""Causes of wrong bytes under a contract: the same contract with one mistake, or with two."""
