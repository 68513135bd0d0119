"""Memory of a case, estimated before the run: a case without enough memory is an error and harms no other process."""

from __future__ import annotations

import math
import os
from pathlib import Path

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.cost import home_of
from narrowgauge.harness.cases.gemm import GemmCase, ProductCase
from narrowgauge.harness.cases.modules import ModuleCase
from narrowgauge.harness.cases.quantize import QuantizeCase

BYTES = {
    "quantize": (42, 0), "quantize bands": (24, 0), "gemm bands": (66, 24),
    "quantize columnwise": (57, 0), "quantize both": (110, 0), "quantize-grouped": (66, 0),
    "transform": (60, 0), "swizzle": (26, 0), "update-scale": (110, 0), "gemm": (66, 360), "gemm-grouped": (66, 360),
    "gemm-quantized": (66, 430), "linear": (110, 200), "layernorm-linear": (110, 200), "grouped-linear": (110, 200),
    "transformer-layer": (110, 200),
}  # fmt: skip
"""Bytes per quantized or moved element, and per output of a product.

The largest of the recipes, dtypes and flags measured on either device, plus a tenth: on a CPU the resident set of a
process (2^22 elements: quantize 21, both halves 105, grouped 60, transform 54, swizzle 22; product 58 and 163), on an
H200 the memory allocated by torch, the `bytes_peak` of each record (quantize 38, columnwise 51, both halves 69; product
149 an output, in the order of tensor cores 214 and, for 1024³, 330).
"""
KEPT = 1 << 30
"""Bytes of a GPU that a process may keep between cases."""


def needed(case: Case) -> int:
    """Peak memory of a case in bytes: inputs, results of all runs, reference, and tensors of the checks."""
    name = case.operation
    if isinstance(case, ModuleCase):
        elements = outputs = 0
        for layer in case.layers:
            weights = max(1, layer.groups) * layer.inner * layer.outer
            elements += case.rows * (layer.inner + layer.outer) + weights
            outputs = max(outputs, case.rows * layer.inner, case.rows * layer.outer, weights)
        elements *= case.steps
    elif isinstance(case, ProductCase):
        rows, depth, columns = case.shape
        matrices = max(1, len(case.section_sizes))
        elements, outputs = depth * (rows + matrices * columns), rows * columns
        if isinstance(case, GemmCase) and case.bands:
            name += " bands"
    else:
        elements, outputs = math.prod(case.shape), 0
        if isinstance(case, QuantizeCase) and (case.bands or case.usage != "rowwise"):
            name += " bands" if case.bands else f" {case.usage}"
    element, output = BYTES[name]
    return element * elements + output * outputs


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
    need = needed(case)
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
