"""Architecture of the processor of a run. Runs of one architecture are comparable: H100 and H200 are both `sm_90`."""

from __future__ import annotations

import re

HOST = "host"
"""Architecture of every CPU: the kernels of a CPU give the same bytes on all of them."""
UNKNOWN = "an unknown architecture"
NAME = re.compile(r"host|sm_\d{2,3}")
"""Names of architectures."""
_CAPABILITY = re.compile(r", compute capability (\d+)\.(\d)$")


def architecture(device: str, environment: dict[str, str]) -> str:
    """`host` for a run on "cpu", else `sm_` and the digits of the compute capability, such as `sm_90`.

    `environment` is the result of `harness.records.environment.describe_run`. `UNKNOWN` if it names no compute
    capability.
    """
    if device == "cpu":
        return HOST
    match = _CAPABILITY.search(environment.get("GPU", ""))
    return f"sm_{match[1]}{match[2]}" if match else UNKNOWN


def product_name(device: str, environment: dict[str, str]) -> str:
    """`cpu` for a run on "cpu", else the GPU's name, such as `NVIDIA H200`. A MIG slice has the name of its GPU."""
    if device == "cpu":
        return device
    name = _CAPABILITY.sub("", environment.get("GPU", "an unknown GPU"))
    return name.partition(" MIG ")[0]
