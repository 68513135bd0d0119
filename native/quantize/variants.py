"""Variants of the quantization kernels: the choices of a recipe that the compiler knows on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from narrowgauge.native.runtime.structs import KernelStruct, Value


def variant_flags(struct: KernelStruct, variant: Mapping[str, Value], device: torch.device) -> tuple[str, ...]:
    """Flags that compile a kernel for one variant, given by the fields of its struct.

    On a GPU the macro VARIANT initializes the struct, and NVRTC compiles every variant separately, which takes
    a second, once. On a CPU there is no flag: the C++ compiler would take many seconds for a variant; the
    kernel reads the variant from its parameters. Raises as `KernelStruct` does.
    """
    return _flags(struct, tuple(variant.items())) if device.type == "cuda" else ()


@cache
def _flags(struct: KernelStruct, fields: tuple[tuple[str, Value], ...]) -> tuple[str, ...]:
    return (f"-DVARIANT={struct.initializer(**dict(fields))}",)
