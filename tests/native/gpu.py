"""Requirements of tests on a GPU, and the reasons to skip them."""

from __future__ import annotations

import warnings

import pytest
import torch

from narrowgauge.native.runtime import host
from narrowgauge.native.runtime.sources import ToolchainError

DEVICE = "cuda"


def missing() -> str | None:
    """Reason why no kernel can run on a GPU of this machine, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch and CuPy about missing drivers, which the reason covers
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no CUDA device; kernels are not run on a GPU"
        try:
            import cupy  # noqa: F401
        except ImportError as error:
            return f"CuPy cannot be imported ({error}): pip install 'narrowgauge[cuda13]'; kernels are not run on a GPU"
    return None


def no_compiler() -> str | None:
    """Reason why no kernel can run on a CPU of this machine, or None."""
    try:
        host.compiler()
    except ToolchainError as error:
        return str(error)
    return None


MISSING = missing()
NO_COMPILER = no_compiler()
HOPPER = MISSING is None and torch.cuda.get_device_capability() == (9, 0)

needs_gpu = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
needs_compiler = pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
