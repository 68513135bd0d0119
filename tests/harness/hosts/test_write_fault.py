"""A write to read-only memory: found in every memory with a handler, and left to the system elsewhere."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CODE = """
import ctypes, mmap, os, signal, sys
from functools import partial
from narrowgauge.harness.hosts.write_fault import on_write

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
starts = [libc.mmap(None, ctypes.c_size_t(4096), mmap.PROT_READ, 0x22, -1, ctypes.c_long(0)) for _ in range(2)]

def offset(start, address):
    return address - start if start <= address < start + 4096 else None

for number, start in enumerate(starts):
    on_write(partial(offset, start), lambda found, number=number: print(number, found, flush=True))
os.kill(os.getpid(), signal.SIGSEGV) if sys.argv[1] == "sent" else ctypes.memset(eval(sys.argv[1]), 0, 1)
"""


@pytest.mark.parametrize(
    ("address", "output", "status"),
    [
        ("starts[0] + 7", "0 7\n", 128 + signal.SIGSEGV),
        ("starts[1] + 9", "1 9\n", 128 + signal.SIGSEGV),
        ("8", "", -signal.SIGSEGV),
        ("sent", "", -signal.SIGSEGV),
    ],
)
def test_a_write_is_told_to_the_handler_of_its_memory(address: str, output: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, address], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (output, status), done.stderr
