"""Kernels on a GPU: the .cu files compiled by NVRTC and launched through CuPy on torch's current stream."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowgauge.native.runtime.cache import cache_key, cached
from narrowgauge.native.runtime.sources import ToolchainError, scratch_of, text

if TYPE_CHECKING:
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


_MUCH_SHARED = 16 * 1024
"""Bytes of a block from which on the driver, left alone, does not find room for as many blocks as there is."""


class _Kernel:
    """A loaded kernel. Its module stays loaded while this lives."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.address: int = function.ptr
        self.shared_bytes = 0
        """Dynamic shared memory that it was asked for."""


@cache
def _kernel(source: str, name: str, kernels: str, device: int, extra_flags: tuple[str, ...]) -> _Kernel:
    module = _module(source, kernels, device, extra_flags)
    with _cupy().cuda.Device(device):
        function = module.get_function(name)
        if function.shared_size_bytes > _MUCH_SHARED:
            function.preferred_shared_memory_carveout = 100
        return _Kernel(function.kernel)


_LETTERS = {int: "P", np.uint64: "Q", np.int64: "q", np.uint32: "I", np.int32: "i", np.float32: "f", np.float64: "d"}
"""Of `struct`, whose native alignment is that of a kernel's parameters."""
_MOST = 4096
"""Bytes of parameters that a kernel can have."""
_POINTER, _SIZE, _END = 1, 2, 0
"""CU_LAUNCH_PARAM_BUFFER_POINTER, …_SIZE, …_END of cuda.h."""


class _Parameters(threading.local):
    """A kernel's parameters in one buffer, as cuLaunchKernel takes them by `extra`. A launch copies them."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_MOST)
        self.size = ctypes.c_size_t()
        entries = _POINTER, ctypes.addressof(self.buffer), _SIZE, ctypes.addressof(self.size), _END
        self._extra = (ctypes.c_void_p * len(entries))(*entries)
        self.extra = ctypes.addressof(self._extra)

    def pack(self, arguments: Sequence[np.generic | int]) -> int:
        """The address of the list for `extra`."""
        layout = "".join([f"{len(one)}s" if isinstance(one, np.bytes_) else _LETTERS[type(one)] for one in arguments])
        struct.pack_into(layout, self.buffer, 0, *arguments)
        self.size.value = struct.calcsize(layout)
        return self.extra


_parameters = _Parameters()


def launch(
    source: str,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    arguments: Sequence[np.generic | int],
    *,
    device: torch.device,
    extra_flags: tuple[str, ...] = (),
    shared_bytes: int = 0,
) -> None:
    """Queue one kernel on the device's current torch stream; compiled kernels are cached by text, flags, target.

    Arguments are numbers of the parameters' types, addresses as int, and the bytes of structs, whose alignment those
    before them give. Nothing is queued for a grid of no blocks. A block has `shared_bytes` of dynamic shared memory.
    Raises ToolchainError where CuPy is missing or the kernel does not compile.
    """
    import torch

    cuda = _cupy().cuda
    current = torch.cuda.current_device()
    if device.index is not None and device.index != current:
        with torch.cuda.device(device.index):
            launch(
                source, kernel, grid, block, arguments, device=device, extra_flags=extra_flags,
                shared_bytes=shared_bytes,
            )  # fmt: skip
        return
    loaded = _kernel(source, kernel, text(source), current, extra_flags)
    if 0 in grid:
        return
    driver = cuda.driver
    if not driver.ctxGetCurrent():  # a thread that has not yet called the runtime: its first call gives it the context
        cuda.runtime.free(0)
    if shared_bytes > loaded.shared_bytes:
        driver.funcSetAttribute(loaded.address, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        loaded.shared_bytes = shared_bytes
    stream = torch._C._cuda_getCurrentRawStream(current)  # as current_stream, without an object for each launch
    driver.launchKernel(loaded.address, *grid, *block, shared_bytes, stream, 0, _parameters.pack(arguments))
