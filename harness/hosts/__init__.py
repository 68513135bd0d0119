"""Kernel hosts: processes that import a backend and run its methods, apart from the judge."""
