"""Contracts of a user as operations: their steps from a process of their own, and their case classes."""
