"""Diagnosis of quantizers."""
