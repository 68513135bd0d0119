"""Silencing libraries that write to stderr unconditionally."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silence_stderr() -> Iterator[None]:
    """Discard writes to the process's stderr within the context, also from code outside of Python."""
    sys.stderr.flush()
    stderr_copy, null_device = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)
        os.close(null_device)
