"""Diagnosis: what a wrong result is explained by.

A hypothesis is one known deviation: the reference, run again with it, gives what the kernel gave, to the byte. A
signature is what all wrong elements have in common: their place, or what they are.
"""
