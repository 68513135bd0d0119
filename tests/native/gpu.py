"""What the tests on a GPU need, and the reason to skip them where it is missing."""

from __future__ import annotations

import warnings

import pytest
import torch

from narrowgauge.native.runtime import host
from narrowgauge.native.runtime.sources import ToolchainError

DEVICE = "cuda"


def missing() -> str | None:
    """Why kernels cannot be run on a GPU here; None where they can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and CuPy warn of missing drivers, which the reason says
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no CUDA device; kernels are not run on a GPU"
        try:
            import cupy  # noqa: F401
        except ImportError as error:
            return f"CuPy cannot be imported ({error}): pip install 'narrowgauge[cuda13]'; kernels are not run on a GPU"
    return None


def no_compiler() -> str | None:
    """Why kernels cannot be run on the CPU; None where they can."""
    try:
        host.compiler()
    except ToolchainError as error:
        return str(error)
    return None


MISSING = missing()
NO_COMPILER = no_compiler()

needs_gpu = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
needs_compiler = pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
