"""Settings of a process that judges cases or runs kernels: threads, memory, the end with its parent."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from narrowgauge.harness.machine.processors import cores

KILLED = 30.0
"""Seconds that a killed process has to be gone: a driver may hold it until a kernel is off the GPU."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_… of malloc.h: bytes that are free at the end of a heap, and bytes that have a mapping of their own."""
_BLOCKING_SYNC = 4
"""CU_CTX_SCHED_BLOCKING_SYNC of cuda.h."""
_PARENT_DIES, _CHILD_SUBREAPER = 1, 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of linux/prctl.h."""
_SET_PTRACER = 0x59616D61
"""PR_SET_PTRACER of linux/prctl.h."""


def prepare_process(workers: int, device: str = "cpu") -> None:
    """Give torch, and the native kernels, which use as many threads, the share of the cores of one of `workers`.
    OMP_NUM_THREADS limits it. With a GPU half of the share: threads of torch that wait for work keep a core busy while
    the GPU works."""
    import torch

    _keep_memory()
    limit = os.environ.get("OMP_NUM_THREADS", "")
    share = cores() // (workers * (2 if device == "cuda" else 1))
    torch.set_num_threads(max(1, min(share, int(limit)) if limit.isdigit() else share))


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the context torch has one thread: operations on small matrices take longer on several threads, which also
    keep their cores busy during waits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _keep_memory() -> None:
    """Let malloc use freed memory again before the system has it back and clears every page anew. Measured: 0.62 s of a
    core instead of 0.87 s for gemm/nvfp4/1024x512x2048, reference against reference."""
    with suppress(OSError, AttributeError):  # no glibc
        mallopt = ctypes.CDLL(None).mallopt
        # Some releases take no threshold above half of the size of a thread's heap.
        if not mallopt(_MMAP_THRESHOLD, 1 << 30):
            mallopt(_MMAP_THRESHOLD, 1 << 25)
        mallopt(_TRIM_THRESHOLD, 1 << 29)


def interpreter(target: str, *numbers: int) -> list[str]:
    """Command of a fresh interpreter with the import path of this process, which calls the function `target`,
    "module:name", with numbers."""
    module, _, name = target.partition(":")
    code = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import {name}"
    code += f"; {name}(*map(int, sys.argv[2:]))"
    return [sys.executable, "-P", "-c", code, json.dumps(sys.path), *map(str, numbers)]


def kill_group(pid: int) -> None:
    """Kill a process and its process group."""
    for target in (os.killpg, os.kill):
        with suppress(OSError):
            target(pid, signal.SIGKILL)


def detach_process() -> None:
    """Lead a session and a process group, and end with the parent."""
    os.setsid()
    end_with_parent()


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DIES, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of all its descendants whose parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1)


def allow_reading(connection: socket.socket) -> None:
    """Let the process that made a connection read the memory of this process. Systems with Yama require this."""
    if sys.platform == "linux":
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        ctypes.CDLL(None).prctl(_SET_PTRACER, *map(ctypes.c_ulong, (int.from_bytes(peer[:4], sys.byteorder), 0, 0, 0)))


def ending(status: int | None) -> str:
    """The end of a process in words. `status`: exit status, or the negative number of the signal. None: still there."""
    if status is None:
        return f"it does not end, though it was killed {KILLED:g} s ago"
    if status < 0:
        name = signal.Signals(-status).name
        return f"signal {name}" + (", as where memory runs out" if name == "SIGKILL" else "")
    return f"exit status {status}"


@cache
def wait_for_gpus_asleep() -> None:
    """Let this process sleep while it waits for a GPU. By default CUDA polls the GPU with a whole core.

    Call it before the process uses CUDA: the setting belongs to the context. Without a driver nothing happens.
    """
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            for device in range(count.value):
                driver.cuDevicePrimaryCtxSetFlags_v2(device, _BLOCKING_SYNC)
