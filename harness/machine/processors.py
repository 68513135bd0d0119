"""The processors that a process has: its cores, and its GPU."""

from __future__ import annotations

import os
from itertools import takewhile


def cores() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible() -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them: numbers or UUIDs."""
    if (given := os.environ.get(VISIBLE)) is not None:
        # CUDA, too, ignores what stands behind a name that it does not know, and -1 is none.
        return list(takewhile(lambda name: name not in ("", "-1"), (name.strip() for name in given.split(","))))
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def gpu_of(worker: int, device: str) -> str:
    """The GPU of a worker, counted from 0, by name; nothing where it runs on the CPU or there is none."""
    names = visible() if device == "cuda" else []
    return names[worker % len(names)] if names else ""
