"""Diagnosis of GEMMs."""
