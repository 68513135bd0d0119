"""Membership in a proved interval of `Bounded` or `Bounds`, and the width of the interval."""

from __future__ import annotations

import numpy as np
import torch

from narrowgauge.reference.high_precision.bounded import Bounded
from tests.reference.bounds.test_bounds import accepted, ordinal


def inside(found: torch.Tensor | np.ndarray, expected: Bounded, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """bool: which elements of a kernel's tensor are right. A float32 result is cast to `dtype` first, as kernels do."""
    found = torch.as_tensor(found).detach()
    assert found.shape == expected.shape
    return accepted(expected.limits(dtype), found.to(dtype))


def width(expected: Bounded, dtype: torch.dtype) -> torch.Tensor:
    """How many steps of the dtype the upper end lies above the lower one, float64."""
    lower, upper = expected.interval(dtype)
    return (ordinal(upper) - ordinal(lower)).double()
