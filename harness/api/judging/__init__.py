"""What the assertions share: judging a call, settings, and the saved arguments of a failure."""
