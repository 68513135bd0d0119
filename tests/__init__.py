"""Tests. A package, so that `tests.golden` imports for any start of pytest."""
