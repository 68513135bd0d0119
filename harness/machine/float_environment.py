"""Floating-point environment: control registers of the calling thread, and settings of torch.

A library built with `-ffast-math` sets flush-to-zero in the thread that loads the library, and `fesetround` in a kernel
stays in force after the kernel returns. Every later CPU operation of this thread is affected, including torch. A new
thread inherits the registers of its creator, so OpenMP threads of torch that start after such a change have it too.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

Environment = dict[str, str | int]
"""Control registers as integers (`mxcsr` and `x87-control-word`, or `fpcr`) and settings of torch as text. On a machine
with unknown registers: the observed `rounding-mode` and `subnormal-numbers` as text."""

NEAREST, UP, DOWN, ZERO = "to nearest", "toward +inf", "toward -inf", "toward zero"
KEPT, FLUSHED = "kept", "flushed to zero"


class _Setting(NamedTuple):
    title: str
    consequence: str
    """Consequence of the value `{after}`."""


class _TorchSetting(NamedTuple):
    title: str
    consequence: str
    read: Callable[[Any], str]
    """Called with the module torch."""
    write: Callable[[Any, str], object]


# ---- control registers -----------------------------------------------------------------------------------------------

_THREAD = "CPU kernels and torch in this thread"
_REGISTER_SETTINGS = {
    "rounding-mode": _Setting("the rounding mode", f"{_THREAD} round {{after}}"),
    "subnormal-numbers": _Setting("the handling of subnormal numbers", f"subnormal numbers of {_THREAD} are {{after}}"),
    "trapped-exceptions": _Setting(
        "the list of floating-point exceptions that raise SIGFPE",
        f"SIGFPE ends the process if an operation of {_THREAD} raises: {{after}}",
    ),
    "x87-rounding-mode": _Setting("the rounding mode of the x87 unit", "operations on long double round {after}"),
    "x87-precision": _Setting("the precision of the x87 unit", "results of long double operations have {after}"),
    "nan-payloads": _Setting("the handling of NaN payloads", f"NaN payloads of {_THREAD} are {{after}}"),
    "float16-format": _Setting("the format of float16 numbers", f"{_THREAD} convert float16 numbers as {{after}}"),
}
# Control bits of each register. The other bits are status flags or reserved.
_MXCSR, _X87, _FPCR = 0xFFC0, 0x0F3F, 0x07C8_9F01
_X86_ROUNDING, _ARM_ROUNDING = (NEAREST, DOWN, UP, ZERO), (NEAREST, UP, DOWN, ZERO)
_X87_PRECISION = ("24 bits", "a reserved precision", "53 bits", "64 bits")
_X86_EXCEPTIONS = ("invalid operation", "subnormal operand", "division by zero", "overflow", "underflow", "inexact")
_ARM_EXCEPTIONS = {
    8: "invalid operation", 9: "division by zero", 10: "overflow", 11: "underflow", 12: "inexact",
    15: "subnormal operand",
}  # fmt: skip


class _X86Mode(ctypes.Structure):
    """femode_t of glibc on x86-64."""

    _fields_ = (("control_word", ctypes.c_uint16), ("reserved", ctypes.c_uint16), ("mxcsr", ctypes.c_uint32))


class _ArmMode(ctypes.Structure):
    """femode_t of glibc on aarch64."""

    _fields_ = (("fpcr", ctypes.c_uint32),)


_MODES: dict[str, type[ctypes.Structure]] = {"x86_64": _X86Mode, "aarch64": _ArmMode}


def _load_libm() -> Any:
    """C library with fegetmode and fesetmode, or None if the registers of this machine are unknown."""
    if sys.platform == "linux" and os.uname().machine in _MODES:
        with suppress(OSError, AttributeError):  # no glibc, or glibc before 2.25
            # Not fegetenv and fesetenv: fesetenv of glibc does not set the precision of the x87 unit.
            libm = ctypes.CDLL("libm.so.6")
            libm.fegetmode.argtypes = libm.fesetmode.argtypes = (ctypes.c_void_p,)
            return libm
    return None


_libm = _load_libm()


def _read_registers() -> Environment:
    if _libm is None:
        return _probe_arithmetic()
    mode: Any = _MODES[os.uname().machine]()
    _libm.fegetmode(ctypes.byref(mode))
    if isinstance(mode, _ArmMode):
        return {"fpcr": mode.fpcr & _FPCR}
    return {"mxcsr": mode.mxcsr & _MXCSR, "x87-control-word": mode.control_word & _X87}


# Names and not literals: the compiler of Python computes operations on literals itself.
_ONE, _HALF, _EPSILON, _SMALLEST_NORMAL = 1.0, 0.5, 2.0**-52, 2.0**-1022


def _probe_arithmetic() -> Environment:
    """Rounding mode and handling of subnormal numbers, from results of float64 operations in Python."""
    if _ONE + _EPSILON / 4 != _ONE:
        rounding = UP
    elif -_ONE - _EPSILON / 4 != -_ONE:
        rounding = DOWN
    else:
        rounding = ZERO if _ONE + _EPSILON * 0.75 == _ONE else NEAREST
    kept = _SMALLEST_NORMAL * _HALF / _HALF == _SMALLEST_NORMAL
    return {"rounding-mode": rounding, "subnormal-numbers": KEPT if kept else FLUSHED}


def _write_registers(environment: Mapping[str, str | int]) -> None:
    if _libm is None:
        for name, observed in _probe_arithmetic().items():
            if observed != environment[name]:
                raise RuntimeError(
                    f"{_REGISTER_SETTINGS[name].title} is {observed!r} and cannot be set back to "
                    f"{environment[name]!r} on {os.uname().machine}; judge the case in a process of its own"
                )
        return
    mode = (
        _ArmMode(environment["fpcr"])
        if "fpcr" in environment
        else _X86Mode(environment["x87-control-word"], 0, environment["mxcsr"])
    )
    _libm.fesetmode(ctypes.byref(mode))
    torch = sys.modules.get("torch")
    if torch is None or torch.get_num_threads() == 1:
        return
    with suppress(OSError, AttributeError):  # a torch without OpenMP
        # Found through torch's library: a process can hold several OpenMP libraries, each with its own threads.
        library = os.path.join(os.path.dirname(str(torch.__file__)), "lib", "libtorch_cpu.so")
        parallel = ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_NOLOAD).GOMP_parallel
        # Each thread of the team calls fesetmode(&mode).
        parallel(_libm.fesetmode, ctypes.byref(mode), torch.get_num_threads(), 0)


def _register_settings(environment: Mapping[str, str | int]) -> dict[str, str]:
    """Values in the control registers, by the names of `_REGISTER_SETTINGS`."""
    if "fpcr" in environment:
        fpcr = int(environment["fpcr"])
        return {
            "rounding-mode": _ARM_ROUNDING[fpcr >> 22 & 3],
            "subnormal-numbers": _subnormal_numbers(
                operands=fpcr & (1 | 1 << 24), results=fpcr & 1 << 24, float16_numbers=fpcr & 1 << 19
            ),
            "trapped-exceptions": _listed(name for bit, name in _ARM_EXCEPTIONS.items() if fpcr >> bit & 1),
            "nan-payloads": "replaced by the default NaN" if fpcr & 1 << 25 else KEPT,
            "float16-format": "the alternative format without infinities" if fpcr & 1 << 26 else "IEEE binary16",
        }
    if "mxcsr" in environment:
        mxcsr, x87 = int(environment["mxcsr"]), int(environment["x87-control-word"])
        masked = mxcsr >> 7 & x87
        return {
            "rounding-mode": _X86_ROUNDING[mxcsr >> 13 & 3],
            "subnormal-numbers": _subnormal_numbers(operands=mxcsr & 1 << 6, results=mxcsr & 1 << 15),
            "trapped-exceptions": _listed(name for bit, name in enumerate(_X86_EXCEPTIONS) if not masked >> bit & 1),
            "x87-rounding-mode": _X86_ROUNDING[x87 >> 10 & 3],
            "x87-precision": _X87_PRECISION[x87 >> 8 & 3],
        }
    return {name: str(environment[name]) for name in ("rounding-mode", "subnormal-numbers")}


def _subnormal_numbers(**flushed: int) -> str:
    kinds = " and ".join(kind.replace("_", " ") for kind, bits in flushed.items() if bits)
    return f"{FLUSHED} ({kinds})" if kinds else KEPT


def _listed(names: Iterator[str]) -> str:
    return ", ".join(names) or "none"


# ---- settings of torch -----------------------------------------------------------------------------------------------

_DETERMINISM = ("not required", "required, else a warning", "required, else an error")
_REDUCTIONS = {(True, True): "allowed", (False, True): "forbidden", (False, False): "forbidden, split-K too"}
_PRODUCTS = (("cuda", "matmul", "GPU"), ("mkldnn", "matmul", "CPU"))
_CUDNN = (("cuda", "conv", "convolutions"), ("cuda", "rnn", "recurrent layers"))


def _read_default_device(torch: Any) -> str:
    # torch.get_default_device makes a tensor, and thereby initialises CUDA.
    context = sys.modules.get("torch.utils._device")
    return str(getattr(context, "CURRENT_DEVICE", None) or torch._C._get_default_device())


def _write_default_device(torch: Any, value: str) -> None:
    torch.set_default_device(None if value == "cpu" else value)


def _read_precision(torch: Any, operations: tuple[tuple[str, str, str], ...]) -> str:
    """`fp32_precision` of each operation: ieee, tf32 or bf16. The older flags raise if a program has set both kinds."""
    values = ((torch._C._get_fp32_precision_getter(*operation), name) for *operation, name in operations)
    return ", ".join(f"{'ieee' if value == 'none' else value} ({name})" for value, name in values)


def _write_precision(torch: Any, operations: tuple[tuple[str, str, str], ...], values: tuple[str, ...]) -> None:
    for (*operation, _), value in zip(operations, values, strict=True):
        torch._C._set_fp32_precision_setter(*operation, value)


def _precisions(value: str) -> tuple[str, ...]:
    return tuple(part.split()[0] for part in value.split(", "))


def _write_product_precision(torch: Any, value: str) -> None:
    gpu, cpu = _precisions(value)
    # Sets the older flag too, or torch.get_float32_matmul_precision raises.
    torch._C._set_float32_matmul_precision("highest" if gpu != "tf32" else "medium" if cpu == "bf16" else "high")
    _write_precision(torch, _PRODUCTS, (gpu, cpu))


def _write_cudnn_precision(torch: Any, value: str) -> None:
    precisions = _precisions(value)
    torch._C._set_cudnn_allow_tf32("tf32" in precisions)
    _write_precision(torch, _CUDNN, precisions)


def _reduction(dtype: str, name: str) -> _TorchSetting:
    attribute = f"allow_{dtype}_reduced_precision_reduction"

    def read(torch: Any) -> str:
        flags = getattr(torch._C, f"_get_cublas_{attribute}")()
        return _REDUCTIONS[(flags, True) if isinstance(flags, bool) else tuple(flags)]  # an older torch gives a bool

    def write(torch: Any, value: str) -> None:
        flags = next(flags for flags, text in _REDUCTIONS.items() if text == value)
        setattr(torch.backends.cuda.matmul, attribute, flags if flags == (False, False) else flags[0])

    return _TorchSetting(
        f"torch's reduced-precision reduction of {name} products (`{attribute}`)",
        f"sums of partial {name} results in cuBLAS with less than float32 precision are {{after}}",
        read,
        write,
    )


_TORCH_SETTINGS = {
    "torch-default-dtype": _TorchSetting(
        "torch's default dtype",
        "new tensors of Python floats are {after}",
        lambda torch: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda torch, value: torch.set_default_dtype(getattr(torch, value)),
    ),
    "torch-default-device": _TorchSetting(
        "torch's default device", "new tensors are on {after}", _read_default_device, _write_default_device
    ),
    "torch-deterministic-algorithms": _TorchSetting(
        "torch's setting of deterministic algorithms",
        "operations of torch with a deterministic algorithm: {after}",
        lambda torch: _DETERMINISM[torch.get_deterministic_debug_mode()],
        lambda torch, value: torch.set_deterministic_debug_mode(_DETERMINISM.index(value)),
    ),
    "torch-matmul-precision": _TorchSetting(
        "torch's precision of float32 matrix products (`set_float32_matmul_precision`, `allow_tf32`)",
        "torch rounds the operands of float32 matrix products to: {after}",
        lambda torch: _read_precision(torch, _PRODUCTS),
        _write_product_precision,
    ),
    "torch-cudnn-precision": _TorchSetting(
        "torch's precision of float32 operations in cuDNN (`cudnn.allow_tf32`)",
        "cuDNN rounds float32 operands to: {after}",
        lambda torch: _read_precision(torch, _CUDNN),
        _write_cudnn_precision,
    ),
    "torch-bf16-reduction": _reduction("bf16", "bfloat16"),
    "torch-fp16-reduction": _reduction("fp16", "float16"),
    "torch-fp16-accumulation": _TorchSetting(
        "torch's setting of float16 accumulation (`allow_fp16_accumulation`)",
        "float16 accumulators of float16 products in cuBLAS are {after}",
        lambda torch: "allowed" if torch.backends.cuda.matmul.allow_fp16_accumulation else "forbidden",
        lambda torch, value: setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", value == "allowed"),
    ),
}

# ---- reading, comparing, restoring -----------------------------------------------------------------------------------


def read_environment() -> Environment:
    """Control registers of the calling thread and settings of torch. Plain values, for JSON.

    Settings of torch are read if torch is already imported. CUDA is not initialised.
    """
    environment = _read_registers()
    if (torch := sys.modules.get("torch")) is not None:
        environment |= {name: setting.read(torch) for name, setting in _TORCH_SETTINGS.items()}
    return environment


def changes(before: Mapping[str, str | int], after: Mapping[str, str | int]) -> list[dict[str, str]]:
    """A note for each changed setting: its cause, such as `changes-rounding-mode`, and a sentence.

    A setting of only a single environment is not compared: import torch before the first reading.
    """
    old, new = _settings(before), _settings(after)
    settings: dict[str, _Setting | _TorchSetting] = {**_REGISTER_SETTINGS, **_TORCH_SETTINGS}
    changed = [name for name in new if name in old and old[name] != new[name]]
    if {"rounding-mode", "x87-rounding-mode"} <= {*changed} and new["rounding-mode"] == new["x87-rounding-mode"]:
        changed.remove("x87-rounding-mode")  # fesetround sets both
    return [
        {
            "cause": f"changes-{name}",
            "sentence": f"{settings[name].title} changed from {old[name]!r} to {new[name]!r}: "
            f"{settings[name].consequence.format(after=new[name])}",
        }
        for name in changed
    ]


def require_default(environment: Mapping[str, str | int]) -> None:
    """Raise RuntimeError if the rounding mode is not to nearest or subnormal numbers are flushed to zero: inputs and
    expected results computed by this process would be wrong."""
    settings = _settings(environment)
    for name, default in (("rounding-mode", NEAREST), ("subnormal-numbers", KEPT)):
        if settings[name] != default:
            raise RuntimeError(
                f"{_REGISTER_SETTINGS[name].title} of the judge process is {settings[name]!r} instead of {default!r}: "
                "inputs and expected results would be wrong. Remove the library that sets it when it is loaded, such "
                "as a library in LD_PRELOAD or a Python plugin that was built with -ffast-math"
            )


def restore(environment: Mapping[str, str | int]) -> None:
    """Set the registers and the settings of torch back to those of `environment`, read earlier in this thread.

    The registers are set in the calling thread and in the OpenMP threads that run torch's operations for this thread.
    Not restored: other threads, such as torch's autograd and inter-op threads and threads of a backend, and their
    OpenMP threads; settings of torch if torch was not imported when `environment` was read; a default tensor type.

    Raises RuntimeError if the registers of this machine are unknown and the environment has changed.
    """
    _write_registers(environment)
    torch = sys.modules.get("torch")
    if torch is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its older precision flags are deprecated
        for name, setting in _TORCH_SETTINGS.items():
            if name in environment and setting.read(torch) != environment[name]:
                setting.write(torch, str(environment[name]))


@contextmanager
def restored_environment() -> Iterator[None]:
    """Restore the floating-point environment at the end of the context, as `restore` does."""
    environment = read_environment()
    try:
        yield
    finally:
        restore(environment)


def _settings(environment: Mapping[str, str | int]) -> dict[str, str]:
    torch_settings = {name: str(environment[name]) for name in _TORCH_SETTINGS if name in environment}
    return _register_settings(environment) | torch_settings
