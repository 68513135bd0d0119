"""Cores and GPUs available to a process."""

from __future__ import annotations

import os
from itertools import takewhile


def cores() -> int:
    """Number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float:
    """Processes that run or wait for a core, a mean of the last minute. 0 if the system has no count."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def other_work(before: float, after: float, own: int) -> str:
    """Sentence on the work of other programs during a measurement. Empty if the cores had room for all.

    `before`, `after`: `load` at the start and at the end; `own`: processes of the measurement that run at once.
    """
    others = round(max(before, after - own))
    if others < 1 or others + own <= cores():
        return ""
    return f"{others} other processes on {cores()} cores during the run: times are longer than without them"


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
ALL_DEVICES = "NARROWGAUGE_GPUS"
"""Environment variable of a worker with the names of the GPUs of its run; the worker sees a single GPU."""


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES: numbers or UUIDs."""
    if (variable := os.environ.get(VISIBLE_DEVICES)) is not None:
        # CUDA also ignores all entries behind an unknown name; -1 ends the list.
        return list(takewhile(lambda name: name not in ("", "-1"), (name.strip() for name in variable.split(","))))
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def gpus_of_ranks(count: int) -> list[str]:
    """Names of the GPUs of as many ranks, that of this process first; fewer if the run has fewer GPUs."""
    own = visible_gpus()
    every = own + [name for name in os.environ.get(ALL_DEVICES, "").split(",") if name and name not in own]
    return every[:count]


def worker_gpu(worker: int, device: str) -> str:
    """Name of the GPU of a worker, counted from 0. Empty if the worker runs on the CPU or the machine has no GPU."""
    names = visible_gpus() if device == "cuda" else []
    return names[worker % len(names)] if names else ""
