"""The rules that turn two results into a verdict: one file a rule."""
