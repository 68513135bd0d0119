"""Launching a test's own kernel on the host with arrays in place of addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from native import host

Source = Callable[[str], str]
"""The fixture `cuda_source`: a kernel's text to the name of its source."""

ONE = (1, 1, 1)


def run(
    source: str,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    *arguments: np.ndarray | np.generic,
    workers: int = 1,
    flags: tuple[str, ...] = (),
) -> None:
    """One kernel to its end; an array passes its address."""
    plain = [np.uintp(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments]
    host.launch(source, kernel, grid, block, plain, workers=workers, extra_flags=flags)
