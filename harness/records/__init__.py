"""Records of cases, the journal of a run, its environment, and saved failures."""
