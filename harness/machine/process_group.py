"""The group of processes of a collective, in a kernel host: gloo on a CPU, NCCL on GPUs."""

from __future__ import annotations

import os
from typing import Any

GROUP = object()
"""The argument `group` of a method, for a judge. A host passes its own group."""
_WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0"}
"""Sums over NVLink multicast have no declared order, and not every machine lets a process set them up."""


def join(meeting: int, rank: int, count: int, device: str) -> None:
    """Make this process rank `rank` of `count`. `meeting`: descriptor of the file in which the processes meet. A group
    that the process has joined before is left. Raises RuntimeError if the processes do not meet."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ |= _WITHOUT_MULTICAST
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"/proc/self/fd/{meeting}", count)  # type: ignore[attr-defined]  # of a C++ module
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=count)


def joined() -> Any:
    """The group of this process. Raises ValueError before `join`."""
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ValueError("this host has joined no group of processes")
    return dist.group.WORLD
