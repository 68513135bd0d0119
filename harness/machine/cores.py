"""The cores that a process has: `taskset`, a container or a scheduler may leave it fewer than the machine has."""

import os


def cores() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
