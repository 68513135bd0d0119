"""Tests. A package, so that `tests.golden` imports however pytest is started."""
