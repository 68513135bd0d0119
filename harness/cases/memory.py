"""The memory that a case needs, before it starts: a case that would not fit says so, and nothing else dies of it."""

from __future__ import annotations

import math
import os
from pathlib import Path

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.cost import home_of
from narrowgauge.harness.cases.parameters import layers_of

BYTES = {
    "quantize": (42, 0), "quantize columnwise": (57, 0), "quantize both": (110, 0), "quantize-grouped": (66, 0),
    "transform": (60, 0), "swizzle": (26, 0), "update-scale": (110, 0), "gemm": (66, 360), "gemm-grouped": (66, 360),
    "gemm-quantized": (66, 430), "linear": (110, 200), "layernorm-linear": (110, 200), "grouped-linear": (110, 200),
    "transformer-layer": (110, 200),
}  # fmt: skip
"""Bytes for each element of what is quantized or moved, and for each output of a product.

Largest of the recipes, dtypes and flags measured on either device, a tenth more: on a CPU the resident set of a process
(2^22 elements: quantize 21, both halves 105, grouped 60, transform 54, swizzle 22; product 58 and 163), on an H200 what
torch allocates, which `bytes_peak` of every record is (quantize 38, columnwise 51, both halves 69; product 149 an
output, in the order of tensor cores 214 and, of 1024³, 330).
"""
KEPT = 1 << 30
"""Bytes of a GPU that a process may keep between cases."""


def needed(case: Case) -> int:
    """Bytes that a case needs at once: inputs, results of all runs, reference, and what the checks make of them."""
    name = case.operation
    if case.is_module:
        rows, elements, outputs = math.prod(case.shape[:-2]), 0, 0
        for layer in layers_of(case):
            weights = max(1, layer.groups) * layer.inner * layer.outer
            elements += rows * (layer.inner + layer.outer) + weights
            outputs = max(outputs, rows * layer.inner, rows * layer.outer, weights)
        elements *= case.steps
    elif name.startswith("gemm"):
        rows, depth, columns = case.shape
        matrices = len(case.sections) if "grouped" in name else 1
        elements, outputs = depth * (rows + matrices * columns), rows * columns
    else:
        elements, outputs = math.prod(case.shape), 0
        name += f" {case.usage}" if name == "quantize" and case.usage != "rowwise" else ""
    element, output = BYTES[name]
    return element * elements + output * outputs


def room(device: str) -> int:
    """Bytes that this process could take: of its GPU, or of the machine's memory."""
    if device == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # no Linux: all that there is
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def shortage(case: Case, device: str) -> str:
    """Why a case does not fit beside what else is in memory now, and what to do; nothing where it fits."""
    home = home_of(case, device)
    need = needed(case)
    if need < KEPT or need <= (there := room(home)):
        return ""
    where = "the GPU" if home == "cuda" else "this machine"
    shape = "x".join(map(str, case.shape))
    return (
        f"does not fit: {shape} needs about {gigabytes(need)}, and {where} has {gigabytes(there)} free; fewer "
        "processes (-n), nothing else beside them, or a smaller shape"
    )


def gigabytes(count: int) -> str:
    """Bytes for people: `12.3 GB`."""
    return f"{count / 1e9:.3g} GB"
