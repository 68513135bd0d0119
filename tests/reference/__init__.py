"""Tests of the oracle: against whole value sets, other people's libraries, golden bytes and a scalar twin."""
