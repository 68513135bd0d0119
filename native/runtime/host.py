"""Kernels on a CPU: the same .cu files compiled by the host's C++ compiler against kernels/simt.h."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import numpy as np

from narrowgauge.native.runtime.cache import cache_key, cached
from narrowgauge.native.runtime.sources import FOLDER, KERNELS, ToolchainError, scratch_of, text

# -ffp-contract=off: a fused multiply-add rounds once where the kernels say twice. The next two change no result:
# they let comparisons and conversions be vectorized. -fvisibility=hidden: GCC makes variables of inline functions and
# templates, and so __shared__ ones, unique in the process; two kernels with one name would write to each other's.
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fvisibility=hidden", "-fPIC", "-shared", "-pthread",
)  # fmt: skip

OPENMP = "-fopenmp"
"""Not of Clang, which comes without the library. That of g++ is torch's where torch has it: the kernels run on torch's
own threads, which wait busily for some milliseconds after each operation. Threads that are started for each launch find
those on the cores: of two, quantize then took 1.5 to 2 times as long (2^21 elements), as long as with one thread."""

REPLACED = (*(flag for flag in FLAGS if flag != "-O3"), "-O1", "-DNARROWGAUGE_PORTABLE")
"""Flags of kernels one of whose files is replaced: they run on a few small cases, and compiling them is what costs.
Portable, so that what is replaced in the form for one element is not lost where a CPU has one for many (lanes.cuh)."""

SANITIZED = (
    *(flag for flag in FLAGS if flag != "-O3"), "-O1", "-g", "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DSIMT_SANITIZE",
)  # fmt: skip
"""Flags in a process that has the sanitizers: findings name lines, and the first one ends the process."""
SANITIZE = "NARROWGAUGE_SANITIZE"
"""Environment variable of such a process: `native.runtime.sanitizer` sets it together with all else that is needed."""

ORDERS = ("forward", "reverse", "shuffled")

MAX_THREADS = 1024  # of a block, as in simt.h

_order: ContextVar[str] = ContextVar("thread_order", default="forward")
_shuffle: ContextVar[int] = ContextVar("shuffle", default=1)


@contextlib.contextmanager
def thread_order(order: str, seed: int = 1) -> Iterator[None]:
    """Within the context, threads of a block (and blocks of a grid) take turns forward, in reverse, or shuffled.

    Another `seed`, from 1 on, shuffles in another way. Raises ValueError for another order.
    """
    if order not in ORDERS:
        raise ValueError(f"threads can run {', '.join(ORDERS)}, not {order!r}")
    tokens = _order.set(order), _shuffle.set(seed)
    try:
        yield
    finally:
        _order.reset(tokens[0])
        _shuffle.reset(tokens[1])


def sanitized() -> bool:
    """Whether this process builds kernels with the sanitizers, whose runtime it has."""
    return bool(os.environ.get(SANITIZE))


@cache
def compiler() -> str:
    """Path of the C++ compiler: $CXX, else g++, clang++ or c++. Raises ToolchainError where there is none."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    for name in wanted:
        if path := shutil.which(name):
            return path
    raise ToolchainError(
        f"native kernels on a CPU need a C++ compiler, and {' or '.join(wanted)} is not on the PATH; "
        "install g++ (Debian: apt install g++) or set CXX"
    )


def check() -> None:
    """Raises ToolchainError where there is no C++ compiler, or one that does not run."""
    _compiler_identity()


@cache
def _compiler_identity() -> str:
    # The predefined macros name the compiler's version and, with -march=native, this CPU's instruction sets.
    command = [compiler(), "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolchainError(f"{shlex.join(command)} failed: {done.stderr.strip()[:500]}")
    return done.stdout


def _program(source: str, kernels: str) -> str:
    launchers = "".join(
        f"""
SIMT_EXPORT long long launch_{kernel}(void** arguments, const unsigned* shape, int order, unsigned long long seed,
                                      int workers) {{
    simt::Launch launch{{{{shape[0], shape[1], shape[2]}}, {{shape[3], shape[4], shape[5]}}, order, seed, workers,
                        "{kernel}"}};
    return simt::run_grid(launch, simt::Entry<{kernel}>::run, arguments);
}}
SIMT_EXPORT int parameters_{kernel}() {{ return simt::Entry<{kernel}>::parameters; }}
"""
        for kernel in KERNELS[source]
    )
    if sanitized():
        # Static variables of templates have no redzones, for another library could have the same one; of templates
        # that no other library can know they have.
        kernels = f"namespace {{\n{kernels}\n}}"
    simt = (FOLDER / "cpu" / "simt.h").read_text(encoding="utf-8").replace("#pragma once\n", "\n")
    return f'#line 1 "simt.h"\n{simt}\n{kernels}\n{launchers}'


def library(source: str, extra_flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The compiled kernels of `source`, from the cache where they are there.

    The key is the text, the flags and the compiler with its target, so a stale object is never loaded; processes that
    want the same one wait for the first. Raises ToolchainError with the compiler's words where it does not compile.
    """
    return _library(source, text(source), (*_flags(source), *extra_flags))


def is_clang() -> bool:
    """Whether the compiler is Clang, or one that is made of it."""
    return "#define __clang__ " in _compiler_identity()


def _flags(source: str) -> tuple[str, ...]:
    if sanitized():
        return _sanitized_flags()
    flags = FLAGS if scratch_of(source) is None else REPLACED
    return flags if is_clang() else (*flags, OPENMP)


def _sanitized_flags() -> tuple[str, ...]:
    return (*SANITIZED, "-shared-libasan") if is_clang() else SANITIZED  # what g++ does of itself


@cache
def _library(source: str, kernels: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    program = _program(source, kernels)
    key = cache_key(program, *flags, compiler(), _compiler_identity())
    built = cached(f"{source}-{key}.so", lambda path: _compile(source, program, flags, path), folder=scratch_of(source))
    return ctypes.CDLL(str(built))


def _compile(source: str, program: str, flags: tuple[str, ...], built: Path) -> None:
    code = built.with_suffix(".cpp")
    code.write_text(program, encoding="utf-8")
    command = [compiler(), *flags, "-o", str(built), str(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolchainError(f"{source}.cu does not compile: {done.stderr.strip()[:2000]}")


def launch(
    source: str,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    arguments: Sequence[np.generic],
    *,
    workers: int,
    extra_flags: tuple[str, ...] = (),
) -> None:
    """Run one kernel to its end on `workers` OS threads, on one where it is sanitized.

    Raises ToolchainError where it cannot be compiled, TypeError for a wrong number of arguments, ValueError for a block
    that no GPU runs, RuntimeError where the threads of a block wait for each other forever.
    """
    if not 1 <= math.prod(block) <= MAX_THREADS:
        raise ValueError(f"kernel {kernel}: a block has 1 to {MAX_THREADS} threads, not {tuple(block)}")
    compiled = library(source, extra_flags)
    expected = getattr(compiled, f"parameters_{kernel}")()
    if expected != len(arguments):
        raise TypeError(f"kernel {kernel} has {expected} parameters, but {len(arguments)} arguments were given")
    cells = [np.array(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
    shape = (ctypes.c_uint * 6)(*grid, *block)
    run = getattr(compiled, f"launch_{kernel}")
    run.restype = ctypes.c_longlong
    workers = 1 if sanitized() else workers
    stuck = run(pointers, shape, ORDERS.index(_order.get()), ctypes.c_ulonglong(_shuffle.get()), workers)
    if stuck >= 0:
        raise RuntimeError(
            f"kernel {kernel}: the threads of block {stuck} of grid {tuple(grid)} wait for each other forever; "
            "a barrier or warp operation is not reached by all of them"
        )
