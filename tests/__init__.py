"""Tests of the three packages. A package, so that `tests.golden` imports however pytest is started."""
