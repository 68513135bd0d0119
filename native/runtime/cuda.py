"""Kernels on a GPU: NVRTC compiles the .cu files, and CuPy launches them on torch's current stream."""

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

# Without --fmad=false, a product and a sum would be contracted and round once, but the kernels declare two roundings.
# The next three flags are NVRTC's defaults; explicit, because CuPy's own compilation of a RawModule appends -ftz=true
# (cupy issue 9576), which flushes subnormal numbers. The last flag changes no instruction; tools need it to name source
# lines.
FLAGS = (
    "--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--generate-line-info",
)  # fmt: skip

RUN_ON = {"sm_90": "H100 and H200"}
"""Architectures whose GPUs have run the tests of the kernels and of the reference, and these GPUs."""
COMPILED_FOR = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
"""Targets for which the tests compile every kernel with NVRTC."""


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
    """Raises ToolchainError if CuPy is missing."""
    _cupy()


def architecture(capability: str) -> str:
    """Target of a compute capability ("90"): from 9.0 on the architecture-specific one ("sm_90a")."""
    return f"sm_{capability}a" if int(capability) >= 90 else f"sm_{capability}"


def flags_of(source: str, version: tuple[int, int]) -> tuple[str, ...]:
    """Flags of a source for a version of NVRTC alone."""
    # From sm_89 on NVRTC 12.6, the one of torch for CUDA 12.6, ends with a segmentation fault if quantize_nvfp4 has the
    # chip's conversions to E4M3. Their twins give the same bits.
    return ("-DNARROWGAUGE_PORTABLE",) if source == "quantize_nvfp4" and version == (12, 6) else ()


def _cubin(source: str, kernels: str, target: str, extra_flags: tuple[str, ...]) -> bytes:
    from cupy.cuda import nvrtc

    options = (f"--gpu-architecture={target}", *FLAGS, *extra_flags, *flags_of(source, nvrtc.getVersion()))
    program = nvrtc.createProgram(kernels, f"{source}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).strip() or str(error)
        log = log[max(0, log.find("error") - 200) :]  # warnings come first
        raise ToolchainError(f"{source}.cu does not compile for {target}: {log[:2000]}") from error
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
"""Bytes of static shared memory of a block above which the driver's default carveout limits the number of resident
blocks."""


class _Kernel:
    """A loaded kernel. Its module stays loaded with the object."""

    def __init__(self, function: Any, *, early: bool) -> None:
        self._function = function
        self.early = early
        """Whether the kernel can be launched `early`: griddepcontrol exists from sm_90 on."""
        self.address: int = function.ptr
        self.shared_bytes = 0
        """Largest dynamic shared memory that was requested, in bytes."""


@cache
def _kernel(source: str, name: str, kernels: str, device: int, extra_flags: tuple[str, ...]) -> _Kernel:
    module = _module(source, kernels, device, extra_flags)
    with _cupy().cuda.Device(device):
        function = module.get_function(name)
        if function.shared_size_bytes > _MUCH_SHARED:
            function.preferred_shared_memory_carveout = 100
        return _Kernel(function.kernel, early=function.binary_version >= 90)


_LETTERS = {int: "Q", np.uint64: "Q", np.int64: "q", np.uint32: "I", np.int32: "i", np.float32: "f", np.float64: "d"}
_PARAMETER_LIMIT = 4096
"""Bytes of parameters of a kernel."""
_COUNT_LIMIT = 16
"""Parameters of a kernel."""


class _Parameters(threading.local):
    """Arguments of a kernel for cuLaunchKernel, which copies them: their bytes, and the address of each.

    The driver knows the offsets of the parameters. They are no function of the types: parameters of sm_90 begin at
    0x210, so a first tensor map, aligned to 64 bytes, has the offset 48.
    """

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(_PARAMETER_LIMIT)
        self._first = ctypes.addressof(self._bytes)
        self._addresses = (ctypes.c_void_p * _COUNT_LIMIT)()
        self.addresses = ctypes.addressof(self._addresses)

    def pack(self, arguments: Sequence[np.generic | int | bytes]) -> int:
        """Packs the arguments, and returns the address of their addresses."""
        letters = [f"{len(x)}s" if isinstance(x, bytes) else _LETTERS[type(x)] for x in arguments]
        struct.pack_into("=" + "".join(letters), self._bytes, 0, *arguments)
        place = self._first
        for number, argument in enumerate(arguments):
            self._addresses[number] = place
            place += len(argument) if isinstance(argument, bytes) else struct.calcsize("=" + letters[number])
        return self.addresses


_parameters = _Parameters()


def launch(
    source: str,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    arguments: Sequence[np.generic | int | bytes],
    *,
    device: torch.device,
    extra_flags: tuple[str, ...] = (),
    shared_bytes: int = 0,
    early: bool = False,
) -> None:
    """Queues a kernel on the device's current torch stream. Compiled kernels are cached by text, flags and target.

    Arguments are numbers of the parameters' types, addresses as int, and structs as bytes. An empty grid queues no
    kernel. A block has `shared_bytes` of dynamic shared memory. `early`: as `native.runtime.launch.launch`. Raises
    ToolchainError if CuPy is missing, the kernel does not compile or the driver does not launch it."""
    import torch

    cuda = _cupy().cuda
    current = torch.cuda.current_device()
    if device.index is not None and device.index != current:
        with torch.cuda.device(device.index):
            launch(
                source, kernel, grid, block, arguments, device=device, extra_flags=extra_flags,
                shared_bytes=shared_bytes, early=early,
            )  # fmt: skip
        return
    loaded = _kernel(source, kernel, text(source), current, extra_flags)
    if 0 in grid:
        return
    driver = cuda.driver
    if not driver.ctxGetCurrent():  # a new thread gets its context with its first runtime call
        cuda.runtime.free(0)
    if shared_bytes > loaded.shared_bytes:
        driver.funcSetAttribute(loaded.address, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        loaded.shared_bytes = shared_bytes
    stream = torch._C._cuda_getCurrentRawStream(current)  # current_stream without creating an object
    parameters = _parameters.pack(arguments)
    if early and loaded.early:
        _launch_early(loaded.address, grid, block, shared_bytes, stream, parameters)
    else:
        driver.launchKernel(loaded.address, *grid, *block, shared_bytes, stream, parameters, 0)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, whose value has 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class _Configuration(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        ("sizes", ctypes.c_uint * 6), ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


_EARLY = _Attribute(id=6, value=1)
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


@cache
def library() -> ctypes.CDLL:
    """The driver, for functions that CuPy does not have."""
    return ctypes.CDLL("libcuda.so.1")


def _launch_early(
    address: int, grid: Sequence[int], block: Sequence[int], shared_bytes: int, stream: int, parameters: int
) -> None:
    sizes = (ctypes.c_uint * 6)(*grid, *block)
    configuration = _Configuration(sizes, shared_bytes, stream, ctypes.pointer(_EARLY), 1)
    error = library().cuLaunchKernelEx(
        ctypes.byref(configuration), ctypes.c_void_p(address), ctypes.c_void_p(parameters), None
    )
    if error:
        raise ToolchainError(f"cuLaunchKernelEx returned error {error} of CUresult")
