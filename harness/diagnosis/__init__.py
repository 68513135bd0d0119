"""Diagnosis: explanations of a wrong result.

An exact explanation is a known deviation: the reference with this deviation gives the bytes of the kernel. A signature
is a common property of all wrong elements: their place or their class.
"""
