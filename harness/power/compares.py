"""Arguments of a user's comparison. This module does not import torch."""

from enum import StrEnum


class Compares(StrEnum):
    """Forms of the results that a comparison is given."""

    VALUES = "values"
    RESULTS = "results"
