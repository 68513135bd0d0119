"""The device class: what a baseline is of. Runs of one class give the same figures."""

from __future__ import annotations

from harness.journal import Run

HOST = "host"


def device_class(run: Run) -> str:
    """`host` of a run on a CPU, `NVIDIA H200` and the like of one on a GPU; a MIG slice is of its GPU's class."""
    if run.device == "cpu":
        return HOST
    name = run.environment.get("GPU", "an unknown GPU").partition(", compute capability")[0]
    return name.partition(" MIG ")[0]
