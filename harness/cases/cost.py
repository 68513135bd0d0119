"""Time and memory of a case, estimated before the run. Small cases are judged on the CPU, also for a GPU.

A case without enough memory is an error and harms no other process.
"""

from __future__ import annotations

import os
from pathlib import Path

from narrowgauge.harness.cases.case import Case

KEPT = 1 << 30
"""Bytes of a GPU that a process may keep between cases."""


def estimated_seconds(case: Case) -> float:
    """Seconds of a core to run and judge a case, if its kernels are compiled."""
    whole, element = case.seconds
    return whole + element * case.work


def home_of(case: Case, device: str) -> str:
    """Device of the inputs, the reference and the checks of a case that runs on `device`: `device` itself or the CPU.

    Judging a small case is a thousand small kernels, and only one of several processes at a time has the GPU.
    """
    return "cpu" if case.work < case.small else device


def room(device: str) -> int:
    """Bytes that this process can still allocate, on its GPU or in the memory of the machine."""
    if device == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: all memory of the machine
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def shortage(case: Case, device: str) -> str:
    """Why a case does not fit into the memory that is free now, and the remedy; empty if the case fits."""
    home = home_of(case, device)
    need = case.memory
    if need < KEPT or need <= (free := room(home)):
        return ""
    where = "the GPU" if home == "cuda" else "this machine"
    return (
        f"does not fit: {case.shape_label} needs about {gigabytes(need)}, and {where} has {gigabytes(free)} free; "
        "fewer processes (-n), nothing else beside them, or a smaller shape"
    )


def gigabytes(count: int) -> str:
    """Bytes for people: `12.3 GB`."""
    return f"{count / 1e9:.3g} GB"
