"""Kernels on a GPU: the .cu files compiled by NVRTC and launched through CuPy on torch's current stream."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from native.sources import ToolchainError, text

if TYPE_CHECKING:
    import numpy as np
    import torch

# Without --fmad=false a product and a sum would be contracted and round once where the kernels say twice.
FLAGS = ("--std=c++17", "--fmad=false")


@cache
def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ToolchainError(
            f"native kernels on a GPU need CuPy, which cannot be imported ({error}); "
            "pip install 'narrowgauge[cuda13]', or [cuda12] for CUDA 12"
        ) from error
    return cupy


@cache
def _module(source: str, device: int, extra_flags: tuple[str, ...]) -> Any:
    cupy = _cupy()
    with cupy.cuda.Device(device):
        try:
            module = cupy.RawModule(code=text(source), options=(*FLAGS, *extra_flags), backend="nvrtc")
            module.compile()
        except cupy.cuda.compiler.CompileException as error:
            raise ToolchainError(f"{source}.cu does not compile: {str(error)[:2000]}") from error
    return module


def launch(
    source: str,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    arguments: Sequence[np.generic],
    *,
    device: torch.device,
    extra_flags: tuple[str, ...] = (),
) -> None:
    """Queue one kernel on the device's current torch stream. CuPy caches what it compiles, by text and flags.

    Raises ToolchainError where CuPy is missing or the kernel does not compile.
    """
    import torch

    cupy = _cupy()
    index = torch.cuda.current_device() if device.index is None else device.index
    function = _module(source, index, extra_flags).get_function(kernel)
    with cupy.cuda.Device(index), cupy.cuda.ExternalStream(torch.cuda.current_stream(index).cuda_stream, index):
        function(tuple(grid), tuple(block), tuple(arguments))
