"""NVRTC without a GPU, a driver or CuPy: the libraries of its wheels, of CUDA 12 and 13."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import metadata

import pytest

from narrowgauge.native.runtime import cuda, sources

WHEELS = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}
_ERROR_COMPILATION = 6
"""Enumerator of nvrtcResult, nvrtc.h."""


def missing(major: int) -> str | None:
    """Reason why the NVRTC of CUDA `major` cannot be used on this machine, or None."""
    try:
        _library(major)
    except (ImportError, OSError) as error:
        return f"the NVRTC of CUDA {major} cannot be loaded ({error}); pip install 'narrowgauge[test]'"
    return None


def version(major: int) -> tuple[int, int]:
    """Version of the NVRTC of CUDA `major`."""
    numbers = ctypes.c_int(), ctypes.c_int()
    _library(major).nvrtcVersion(*map(ctypes.byref, numbers))
    return numbers[0].value, numbers[1].value


def cubin_and_ptx(source: str, architecture: str, *flags: str) -> tuple[bytes, str]:
    """`source`.cu for an architecture, sm_…, with the project's flags: the cubin and its PTX."""
    cubin, text = _compiled(13, source, architecture, flags, "CUBIN", "PTX")
    return cubin, text.decode()


def cubin(major: int, source: str, architecture: str, *flags: str) -> bytes:
    """`source`.cu for an architecture, sm_…, by the NVRTC of CUDA `major`, with the project's flags for its version."""
    flags += cuda.flags_of(source, version(major))
    return _compiled(major, source, architecture, flags, "CUBIN")[0]


def ptx(source: str, target: str, *flags: str) -> str:
    """`source`.cu for a virtual architecture, compute_…, with the project's flags."""
    return _compiled(13, source, target, flags, "PTX")[0].decode()


@cache
def _library(major: int) -> ctypes.CDLL:
    """Raises ImportError if the wheel is not installed, OSError if its library cannot be loaded."""
    files = {file.name.partition(".so")[0]: str(file.locate()) for file in metadata.files(WHEELS[major]) or ()}
    for name in ("libnvrtc-builtins", "libnvrtc"):  # libnvrtc finds its builtins only if they are loaded
        if name not in files:
            raise ImportError(f"{WHEELS[major]} has no {name}.so")
        library = ctypes.CDLL(files[name])
    return library


def _compiled(major: int, source: str, target: str, flags: tuple[str, ...], *kinds: str) -> list[bytes]:
    """Outputs of a compilation, by their names in NVRTC's functions."""
    library, program, size = _library(major), ctypes.c_void_p(), ctypes.c_size_t()

    def given(kind: str) -> bytes:
        check(getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
        out = ctypes.create_string_buffer(size.value)
        check(getattr(library, f"nvrtcGet{kind}")(program, out))
        return out.raw

    def check(error: int) -> None:
        if error:
            log = "" if error != _ERROR_COMPILATION else given("ProgramLog").decode(errors="replace")
            pytest.fail(f"{source}.cu for {target}: error {error} of nvrtcResult\n{log}")

    options = [option.encode() for option in (f"--gpu-architecture={target}", *cuda.FLAGS, *flags)]
    text, name = sources.text(source).encode(), f"{source}.cu".encode()
    check(library.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None))
    try:
        check(library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)))
        return [given(kind) for kind in kinds]
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
