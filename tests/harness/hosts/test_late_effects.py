"""What a case leaves in its process: the case is named, and later cases do not fail."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.hosts.remote_host import hosted_backend
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops
from tests.harness.sample_backends import QUANTIZE

_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_ANONYMOUS, _FIXED = 0x22, 0x10


def _map_over(x: torch.Tensor) -> None:
    page = x.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    assert _libc.mmap(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, _ANONYMOUS | _FIXED, -1, 0) == page


def _unmap(x: torch.Tensor) -> None:
    _libc.munmap(ctypes.c_void_p(x.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE))


def _limit(number: int, value: int) -> Callable[[Any], None]:
    return lambda x: resource.setrlimit(number, (value, resource.getrlimit(number)[1]))


def _file_timer(x: torch.Tensor) -> None:
    threading.Timer(600, os.abort).start()


EFFECTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "mapping": (_map_over, "leaves-mappings"),
    "no mapping": (_unmap, "leaves-mappings"),
    "memory": (_limit(resource.RLIMIT_AS, 1 << 40), "leaves-limits"),
    "descriptors": (_limit(resource.RLIMIT_NOFILE, 4), "leaves-limits"),
    "file size": (_limit(resource.RLIMIT_FSIZE, 0), "leaves-limits"),
    "alarm": (lambda x: signal.setitimer(signal.ITIMER_REAL, 600), "leaves-timers"),
    "processor alarm": (lambda x: signal.setitimer(signal.ITIMER_PROF, 600), "leaves-timers"),
    "thread": (_file_timer, "leaves-threads"),
}


class Kernels:
    """The reference, with an effect in the last call of a case."""

    def __init__(self) -> None:
        self.calls = 0

    def quantize(self, x: torch.Tensor, recipe: Any) -> Any:
        """As the reference. The rows say which effect."""
        q = ops.quantize(x, recipe)
        self.calls += 1
        if x.shape[0] >= 64 and not self.calls % 2:
            list(EFFECTS.values())[x.shape[0] // 16 - 4][0](x)
        return q


@pytest.fixture(scope="module")
def hosted() -> Iterator[Backend]:
    with hosted_backend(f"{__name__}:Kernels") as backend:
        yield backend


@pytest.mark.parametrize("name", EFFECTS)
def test_what_a_case_leaves_is_its_own(name: str, hosted: Backend) -> None:
    number = list(EFFECTS).index(name)
    first = run_case(replace(QUANTIZE, shape=(64 + 16 * number, 32)), hosted)
    cause = EFFECTS[name][1]
    assert cause in [note["cause"] for note in first.notes], (first.verdict, first.message)
    later = run_case(replace(QUANTIZE, shape=(16, 32)), hosted)
    assert (later.verdict, later.notes) == ("pass", [])
