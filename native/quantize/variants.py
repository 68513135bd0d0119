"""Variants of the quantization kernels: the choices of a recipe that the compiler knows on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from narrowgauge.native.runtime.structs import KernelStruct, Value


def variant_flags(
    struct: KernelStruct, variant: Mapping[str, Value], device: torch.device, macro: str = "VARIANT"
) -> tuple[str, ...]:
    """Flags that compile a kernel for one variant, given by the fields of its struct.

    On a GPU `macro` initializes the struct, and NVRTC compiles every variant separately, which takes
    a second, once. On a CPU there is no flag: the C++ compiler would take many seconds for a variant; the
    kernel reads the variant from its parameters. Raises as `KernelStruct` does.
    """
    return _flags(struct, tuple(variant.items()), macro) if device.type == "cuda" else ()


def unit_flags(kernel: str, device: torch.device) -> tuple[str, ...]:
    """Flags that compile a kernel with the kernels of its unit alone (kernels/quantize/unit.cuh), on a GPU.

    All kernels of 4over6 take NVRTC 3 s, those of a dtype 0.7 s; all of MXFP4 3.7 s, those of a dtype 0.6 to 0.8 s."""
    return _unit_flags(kernel) if device.type == "cuda" else ()


@cache
def _unit_flags(kernel: str) -> tuple[str, ...]:
    dtype = kernel.rpartition("_")[2].upper()
    unit = dtype if dtype in ("FP32", "BF16", "FP16") and "tiles" not in kernel else "TILES"
    return (f"-DUNIT=UNIT_{unit}",)


@cache
def _flags(struct: KernelStruct, fields: tuple[tuple[str, Value], ...], macro: str) -> tuple[str, ...]:
    return (f"-D{macro}={struct.initializer(**dict(fields))}",)
