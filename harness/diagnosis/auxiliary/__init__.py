"""Diagnosis of operations that only move or rotate numbers."""
