"""Kernels on a GPU: the .cu files compiled by NVRTC and launched through CuPy on torch's current stream."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from native.cache import cache_key, cached
from native.sources import ToolchainError, scratch_of, text

if TYPE_CHECKING:
    import numpy as np
    import torch

# Without --fmad=false a product and a sum would be contracted and round once where the kernels say twice. The next
# three are NVRTC's defaults, said aloud because CuPy's own compilation of a RawModule appends -ftz=true (cupy issue
# 9576): subnormal numbers would be lost. The last one changes no instruction; by it tools name lines of the source.
FLAGS = (
    "--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--generate-line-info",
)  # fmt: skip


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


def check() -> None:
    """Raises ToolchainError where CuPy is missing."""
    _cupy()


def architecture(capability: str) -> str:
    """The target for a device of compute capability `capability` ("90"): with its own instructions from 9.0 on."""
    return f"sm_{capability}a" if int(capability) >= 90 else f"sm_{capability}"


def _cubin(source: str, kernels: str, target: str, extra_flags: tuple[str, ...]) -> bytes:
    from cupy.cuda import nvrtc

    options = (f"--gpu-architecture={target}", *FLAGS, *extra_flags)
    program = nvrtc.createProgram(kernels, f"{source}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        words = nvrtc.getProgramLog(program).strip() or str(error)
        raise ToolchainError(f"{source}.cu does not compile for {target}: {words[:2000]}") from error
    finally:
        nvrtc.destroyProgram(program)


@cache
def _module(source: str, kernels: str, device: int, extra_flags: tuple[str, ...]) -> Any:
    cupy = _cupy()
    from cupy.cuda import nvrtc

    target = architecture(cupy.cuda.Device(device).compute_capability)
    key = cache_key(kernels, *FLAGS, *extra_flags, target, str(nvrtc.getVersion()))
    name = f"{source}-{target}-{key}.cubin"
    path = cached(
        name,
        lambda built: built.write_bytes(_cubin(source, kernels, target, extra_flags)),
        folder=scratch_of(source),
    )
    with cupy.cuda.Device(device):
        return cupy.RawModule(path=str(path))


class _Stream:
    """The address of a stream for CuPy, by the CUDA stream protocol."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def _current_stream(index: int) -> Any:
    import torch

    streams = _cupy().cuda
    address = torch.cuda.current_stream(index).cuda_stream
    if hasattr(streams.Stream, "from_external"):  # CuPy 14, where ExternalStream warns that it is deprecated
        return streams.Stream.from_external(_Stream(address))
    return streams.ExternalStream(address, index)


def launch(
    source: str,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    arguments: Sequence[np.generic],
    *,
    device: torch.device,
    extra_flags: tuple[str, ...] = (),
    shared_bytes: int = 0,
) -> None:
    """Queue one kernel on the device's current torch stream; compiled kernels are cached by text, flags, target.

    A block has `shared_bytes` of dynamic shared memory. Raises ToolchainError where CuPy is missing or the kernel does
    not compile.
    """
    import torch

    cupy = _cupy()
    index = torch.cuda.current_device() if device.index is None else device.index
    function = _module(source, text(source), index, extra_flags).get_function(kernel)
    with cupy.cuda.Device(index), _current_stream(index):
        if shared_bytes > 48 * 1024:  # more has to be asked for
            function.max_dynamic_shared_size_bytes = shared_bytes
        function(tuple(grid), tuple(block), tuple(arguments), shared_mem=shared_bytes)
