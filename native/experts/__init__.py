"""Mixtures of experts: rows of tokens in the sections of experts, and back."""
