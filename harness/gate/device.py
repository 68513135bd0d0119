"""The device class: what a baseline is of. Runs of one class give the same figures."""

from __future__ import annotations

HOST = "host"


def device_class(device: str, environment: dict[str, str]) -> str:
    """`host` of what ran on "cpu"; `NVIDIA H200` and the like of what ran on a GPU, as `environment` names it.

    `environment` is that of `harness.records.environment.describe_run`. A MIG slice is of its GPU's class.
    """
    if device == "cpu":
        return HOST
    name = environment.get("GPU", "an unknown GPU").partition(", compute capability")[0]
    return name.partition(" MIG ")[0]
